"""Cut the suffix that follows an assistant turn out of a rendered conversation.

A sampled turn is never rendered into a prompt again: its ids stay as they were sampled, and only
what the template writes after it is encoded. That text is cut from a render of the whole
conversation, so the served prompt is what the template writes, except for the turns themselves. The
render must start with the prompt that the turn was sampled for; then the turn follows, up to the
token that ends it. Templates do not name that token, so it is detected once for every kind of
continuation.

The ids of a suffix are those of its text encoded alone. The text starts with the end-of-turn token,
which is an added token: tokenizers split text at added tokens first and encode the rest piece by
piece, so what precedes the token has no influence on the ids after it. `encode_suffix` checks that
the first id is that token, and `verify.py` compares suffixes with full renders at start-up.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.messages import Message, Role, ToolCall
from whet.gateway.templates.chat_template import QUESTION, ChatTemplate
from whet.types import Fork

PLACEHOLDER = f"0{secrets.token_hex(8)}0"
"""Text of a placeholder turn: random, so that no agent can write it, without white space or markup,
so that no template alters it."""
PLACEHOLDER_ARGUMENTS = json.dumps({"a": PLACEHOLDER})
NEXT_TEXT = f"1{secrets.token_hex(8)}1"
"""Text of the message after the placeholder turn."""

TOOL: JsonValue = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Arithmetic."}},
            "required": ["expression"],
        },
    },
}

KNOWN_TURN_ENDS: Mapping[str, Sequence[str]] = {
    # A GLM turn has no end token of its own: the model stops by naming the next role.
    "<|observation|>": ("<|user|>", "<|observation|>"),
    # gpt-oss ends every message of a turn with <|end|>; the turn ends with one of these.
    "<|channel|>analysis": ("<|return|>", "<|call|>"),
}
"""End-of-turn tokens by a text in the template, for families where they cannot be detected."""

NEXT_ROLES: Sequence[Role | None] = ("user", "tool", "system", "assistant", None)
"""Role of the next message; None if another assistant turn follows at once."""


class Continuation(NamedTuple):
    """A kind of assistant turn and the role of the message after it."""

    has_calls: bool
    next_role: Role | None


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of an assistant turn before some continuation."""

    prefix: str
    """Text before the end-of-turn token that belongs to the turn."""
    token_id: int
    """The end-of-turn token."""
    token: str
    """Its text."""
    is_stop: bool
    """Whether it ends a turn whatever role is next, so that sampling may stop at it."""


class Mismatch(NamedTuple):
    """The reason why the tokens of a turn cannot be continued."""

    fork: Fork
    cause: str


class SuffixCutter:
    """Cut suffixes, from the end-of-turn token on, out of rendered conversations."""

    def __init__(
        self,
        template: ChatTemplate,
        template_kwargs: Mapping[str, JsonValue],
        *,
        renders_tools: bool,
        keep_thinking: bool,
        thinking: re.Pattern[str] | None,
        turn_syntax: Sequence[str] = (),
    ) -> None:
        """Detect the end of a turn for every continuation.

        `thinking` matches thinking in a prompt; with `keep_thinking` a turn is continued although
        the template leaves its thinking out. `turn_syntax` are tokens inside a turn, such as those
        around a tool call.
        """
        self._template = template
        self._template_kwargs = template_kwargs
        self._probe_tools = (TOOL,) if renders_tools else ()
        self._keep_thinking = keep_thinking
        self._thinking = thinking
        known = [
            token
            for mark, tokens in KNOWN_TURN_ENDS.items()
            if mark in template.source
            for token in tokens
        ]
        ids = (template.find_token_id(token) for token in known)
        self.stop_ids = tuple(
            dict.fromkeys([*template.eos_ids, *(i for i in ids if i is not None)])
        )
        """Ids at which sampling stops."""
        # Added tokens that structure the conversation, rather than the text of a turn.
        self._boundary_ids = template.added_ids - {template.find_token_id(t) for t in turn_syntax}
        self.hides_calls = self._hides_calls()
        """Whether a turn of nothing but calls is rendered without them."""
        continuations = [Continuation(c, role) for c in (False, True) for role in NEXT_ROLES]
        detected = {c: self._detect_turn_end(c) for c in continuations}
        self.turn_ends = {c: end for c, end in detected.items() if end is not None}
        inner = self._find_inner_ids()
        stops = [
            e.token_id for e in self.turn_ends.values() if e.is_stop and e.token_id not in inner
        ]
        self.stop_ids = tuple(dict.fromkeys([*self.stop_ids, *stops]))

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonValue], now: float | None = None
    ) -> str:
        """Render a conversation for comparison with an earlier one.

        Where the template hides calls, a turn of calls alone gets a text, or it would be missing.
        """
        return self._template.render(
            self._fill_empty_turns(messages),
            tools,
            add_generation_prompt=True,
            template_kwargs=self._template_kwargs,
            now=now,
        )

    def find_line(
        self, messages: Sequence[Message], tools: Sequence[JsonValue], offset: int
    ) -> str:
        """Return the line of the template that writes a character of a render at time 0."""
        return self._template.find_line(
            self._fill_empty_turns(messages),
            tools,
            offset,
            template_kwargs=self._template_kwargs,
            now=0.0,
        )

    def _fill_empty_turns(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not self.hides_calls:
            return messages
        return [
            m._replace(content=m.content or PLACEHOLDER) if m.tool_calls else m for m in messages
        ]

    def cut(
        self, prompt: str, full: str, turn: Message, messages: Sequence[Message]
    ) -> str | Mismatch:
        """Return the text of `full` after a turn, from its end-of-turn token on.

        `prompt` is the render that the turn was sampled for, `full` that of the same conversation
        with the turn and the `messages` after it.
        """
        end = self.turn_ends.get(find_continuation(turn, messages))
        if end is None:
            cause = "the chat template does not end the assistant's turn here"
            return Mismatch(Fork.TEMPLATE, cause)
        start = self._find_turn(prompt, full)
        if isinstance(start, Mismatch):
            return start
        at = full.find(end.token, start)
        parts = (turn.reasoning, turn.content, *(call.arguments for call in turn.tool_calls))
        # If the model wrote the token as text, it did not end the turn.
        if at < 0 or any(end.token in part for part in parts):
            cause = "the chat template does not close the assistant's turn here"
            return Mismatch(Fork.TEMPLATE, cause)
        own, suffix = full[start:at], full[at:]
        if turn.reasoning.strip() not in own and not self._keep_thinking:
            return Mismatch(Fork.THINKING_DROPPED, "the turn's own thinking is left out")
        calls = () if self.hides_calls else turn.tool_calls
        parts = (turn.content.strip(), *(_find_call_text(call) for call in calls))
        if any(_is_moved(part, own, suffix, messages) for part in parts):
            cause = "a part of the turn is rendered after the end of the turn"
            return Mismatch(Fork.TEMPLATE, cause)
        return suffix

    def encode_suffix(
        self, suffix: str, turn: Message, messages: Sequence[Message], last: int | None
    ) -> list[int] | Mismatch:
        """Encode the suffix of a turn that was sampled up to the id `last`.

        The end-of-turn token is left out if it was sampled; a truncated turn gets one here.
        """
        end = self.turn_ends[find_continuation(turn, messages)]
        ids = self._template.encode(suffix)
        if ids[:1] != [end.token_id]:  # the token's text is part of a longer token here
            return Mismatch(Fork.TEMPLATE, "the end-of-turn token is not encoded as one token")
        if last == end.token_id:
            return ids[1:]
        if last in self.stop_ids:
            cause = "the turn stopped at another token than the template writes"
            return Mismatch(Fork.TEMPLATE, cause)
        return ids if turn.tool_calls else [*self._template.encode(end.prefix), *ids]

    def encode_extension(
        self, own: str, suffix: str, turn: Message, sampled: str
    ) -> list[int] | Mismatch:
        """Encode what a client has appended to an open turn, and the suffix after it.

        `own` is the render of the turn with the appended text, `sampled` the text of its tokens,
        which includes a stop string.
        """
        known = sampled[max(0, sampled.find(turn.content.strip())) :]
        at = own.find(known.strip())
        if at < 0:  # the last token reaches beyond the stop string
            return Mismatch(Fork.EDITED_HISTORY, "the sampled text is not in the turn as sent back")
        added = own[at + len(known.strip()) :]
        added = added.removeprefix(known[len(known.rstrip()) :])
        return [*self._template.encode(added), *self._template.encode(suffix)]

    def _find_turn(self, prompt: str, full: str) -> int | Mismatch:
        """Find the end of the prompt in a longer render, which is where the turn starts."""
        if full.startswith(prompt):
            return len(prompt)
        start = self._skip_thinking(prompt, full)
        if start is None:
            cause = "the text before a turn is rendered differently after the turn"
            return Mismatch(Fork.TEMPLATE, cause)
        if not self._keep_thinking:
            return Mismatch(Fork.THINKING_DROPPED, "earlier thinking is left out")
        return start

    def _skip_thinking(self, prompt: str, full: str) -> int | None:
        """Find the prompt in `full`, where it may have less thinking and other white space."""
        if self._thinking is None:
            return None
        known = self._thinking.sub("", prompt)
        length = end = 0  # how much was compared so far, of `known` and of `full`
        for match in [*self._thinking.finditer(full), None]:
            kept = full[end : match.start() if match else len(full)]
            left = len(known) - length
            if len(kept) >= left:
                return end + left if kept.startswith(known[length:]) else None
            if not known.startswith(kept, length):
                return None
            length += len(kept)
            end = match.end() if match else len(full)
        return None

    def _hides_calls(self) -> bool:
        turn = _build_placeholder_turn(has_calls=True)
        try:
            text = self._template.render(
                [QUESTION, turn, _build_next_message("tool")],
                self._probe_tools,
                add_generation_prompt=True,
                template_kwargs=self._template_kwargs,
            )
        except RequestError:
            return True
        return PLACEHOLDER not in text

    def _find_inner_ids(self) -> frozenset[int]:
        """Find the tokens before a call or after thinking, at which a turn does not end."""
        called = [_build_placeholder_turn(has_calls=True), _build_next_message("tool")]
        thought = [Message("assistant", PLACEHOLDER, reasoning=NEXT_TEXT)]
        try:
            prompt = self.render([QUESTION], self._probe_tools, now=0.0)
            full = self.render([QUESTION, *called], self._probe_tools, now=0.0)
            after_thinking = self.render([QUESTION, *thought], (), now=0.0).partition(NEXT_TEXT)[2]
        except RequestError:
            return frozenset()
        before_call = full.removeprefix(prompt) if full.startswith(prompt) else ""
        texts = [text.partition(PLACEHOLDER)[0] for text in (before_call, after_thinking)]
        return frozenset(id for text in texts for id in self._template.encode(text))

    def _detect_turn_end(self, continuation: Continuation) -> TurnEnd | None:
        """Find the end of a turn, or None if the template does not allow the continuation."""
        turn = _build_placeholder_turn(has_calls=continuation.has_calls)
        if self.hides_calls:
            turn = turn._replace(content=PLACEHOLDER)
        after = [_build_next_message(continuation.next_role)] if continuation.next_role else []
        tools = self._probe_tools if continuation.has_calls else ()
        text = self._render_after_placeholder(
            [QUESTION, turn, *after], tools, add_generation_prompt=True
        )
        between = text.partition(NEXT_TEXT)[0]
        ids = self._template.encode(between)
        boundaries = [id for id in ids if id in self._boundary_ids]
        if not boundaries:
            return None
        # What also follows a turn that is the last of its conversation belongs to the turn.
        last = self._render_after_placeholder([QUESTION, turn], tools, add_generation_prompt=False)
        alone = self._template.encode(last)
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(ids, alone, strict=False))
        own = [id for id, _ in shared if id in self._boundary_ids]
        known = [id for id in ids if id in self.stop_ids]
        token_id = known[0] if known else own[-1] if own else boundaries[0]
        token = self._template.get_token_text(token_id)
        prefix = between.partition(token)[0]
        return TurnEnd(prefix, token_id, token, is_stop=bool(known or own))

    def _render_after_placeholder(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Return the text after the placeholder turn; "" if the template rejects the messages."""
        try:
            text = self._template.render(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                template_kwargs=self._template_kwargs,
            )
        except RequestError:
            return ""
        _, found, after = text.rpartition(PLACEHOLDER)
        return after if found else ""


def find_continuation(turn: Message, messages: Sequence[Message]) -> Continuation:
    """Classify how a conversation continues after a turn."""
    return Continuation(bool(turn.tool_calls), messages[0].role if messages else None)


def _find_call_text(call: ToolCall) -> str:
    """Return text by which a call is found in a prompt: an argument's value, else its name."""
    value: JsonValue = call.parse_arguments() or call.name
    while isinstance(value, dict | list) and value:
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value.strip() if isinstance(value, str) else json.dumps(value)


def _is_moved(part: str, own: str, suffix: str, messages: Sequence[Message]) -> bool:
    """Return whether a part of a turn is rendered in the suffix instead of in the turn.

    Occurrences that the messages of the suffix wrote do not count.
    """
    if part in own or part not in suffix:
        return False
    texts = [m.content for m in messages]
    texts += [text for m in messages for c in m.tool_calls for text in (c.name, c.arguments)]
    return suffix.count(part) > sum(text.count(part) for text in texts)


def _build_placeholder_turn(*, has_calls: bool) -> Message:
    calls = (ToolCall("call_1", "calculator", PLACEHOLDER_ARGUMENTS),) if has_calls else ()
    return Message("assistant", "" if has_calls else PLACEHOLDER, calls)


def _build_next_message(role: Role) -> Message:
    return Message(role, NEXT_TEXT, tool_call_id="call_1" if role == "tool" else "")
