"""How a chat template wants its messages: found by trying, since templates do not say.

Some want content as a list of parts, some null where a turn has only tool calls, some arguments as
JSON text, some ids of nine letters, and thinking goes by three names. A template that is given the
wrong form drops text without a word, so what counts is whether the text comes out again.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.messages import Message, ToolCall

SHOWN = "0whet0shown0"
"""Text no template touches: no white space, no markup."""
THINKING_NAMES = ("reasoning_content", "reasoning", "thinking")

ThinkingAs = Literal["reasoning_content", "reasoning", "thinking", "content"]

QUESTION = Message("user", "What is 2 + 3?")
CALLED = Message("assistant", "", (ToolCall("call_1", "calculator", f'{{"a": "{SHOWN}"}}'),))
RESULT = Message("tool", "5", tool_call_id="call_1")


@dataclass(frozen=True, slots=True)
class Habits:
    """The form in which a template is given its messages."""

    parts: bool = False
    """Content as a list of parts."""
    null: bool = False
    """No content, rather than an empty one, beside tool calls."""
    text_arguments: bool = False
    """Arguments as JSON text, rather than as an object."""
    short_ids: bool = False
    """Tool-call ids of nine letters and digits, rather than ours."""
    thinking: ThinkingAs = "reasoning_content"
    """Where thinking goes; in `content` it stands between think tags before the rest."""

    def given(self, message: Message) -> dict[str, JsonValue]:
        """A message as this template wants it."""
        value = message.for_template()
        if message.reasoning:
            del value["reasoning_content"]
            if self.thinking == "content":
                inline = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
                value["content"] = inline
            else:
                value[self.thinking] = message.reasoning
        if self.null and message.tool_calls and not value["content"]:
            value["content"] = None
        if self.parts and value["content"] is not None:
            value["content"] = [{"type": "text", "text": value["content"]}]
        shown = cast(list[dict[str, JsonValue]], value.get("tool_calls", []))
        for given, call in zip(shown, message.tool_calls, strict=True):
            if self.text_arguments:
                given["function"] = {"name": call.name, "arguments": call.arguments}
            if self.short_ids:
                given["id"] = _short(call.id)
        if self.short_ids and message.tool_call_id:
            value["tool_call_id"] = _short(message.tool_call_id)
        return value


def _short(id: str) -> str:
    return hashlib.blake2b(id.encode(), digest_size=8).hexdigest()[:9]


Render = Callable[[Habits, Sequence[Message], Sequence[JsonValue], bool], str]


def find_habits(render: Render, source: str) -> Habits:
    """The form in which nothing is lost; the plain one where none is better."""

    def shows(habits: Habits, messages: Sequence[Message], *, open_end: bool = True) -> bool:
        try:
            return SHOWN in render(habits, messages, (), open_end)
        except RequestError:
            return False

    def first(candidates: Iterable[Habits], *dialogues: Sequence[Message]) -> Habits | None:
        ends = (True, False)
        tried = (c for c in candidates for d in dialogues for e in ends if shows(c, d, open_end=e))
        return next(tried, None)

    habits = Habits()
    ask = [Message("user", SHOWN)]
    habits = first([habits, replace(habits, parts=True)], ask) or habits
    forms = [
        replace(habits, null=null, text_arguments=text, short_ids=short)
        for short in (False, True)
        for text in (False, True)
        for null in (False, True)
    ]
    habits = first(forms, [QUESTION, CALLED, RESULT], [QUESTION, CALLED]) or habits
    names = [replace(habits, thinking=name) for name in THINKING_NAMES if name in source]
    if "</think>" in source:
        names.append(replace(habits, thinking="content"))
    thought = Message("assistant", "It is 5.", reasoning=SHOWN)
    calling = CALLED._replace(reasoning=SHOWN, tool_calls=(ToolCall("call_1", "f", "{}"),))
    return first(names, [QUESTION, thought], [QUESTION, calling, RESULT]) or habits
