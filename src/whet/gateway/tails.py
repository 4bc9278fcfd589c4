"""What a chat template writes after an assistant turn, cut out of a short conversation.

A turn that was sampled is never written again, so only what follows it is: it is rendered behind a
stand-in turn and cut off there. The cut is at the token that ends the turn, which templates do not
name: it is found once, for every way a conversation may go on.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, cast

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.frames import Frame, Kinds, frame_of, texts_of, with_texts
from whet.gateway.messages import Message, Role, ToolCall
from whet.gateway.sketch import OpaqueError, Part, sketches
from whet.gateway.template import ChatTemplate

STAND_IN = f"0{secrets.token_hex(8)}0"
"""Text no template touches and no agent can write: no white space, no markup, never the same."""
STAND_IN_ARGUMENTS = json.dumps({"a": STAND_IN})
NEXT = f"1{secrets.token_hex(8)}1"

QUESTION = Message("user", "What is 2 + 3?")
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

ENDS: Mapping[str, Sequence[str]] = {
    # A GLM turn has no token of its own at its end: the model stops by naming who is next.
    "<|observation|>": ("<|user|>", "<|observation|>"),
    # gpt-oss ends every message of a turn with <|end|>; the turn ends with one of these.
    "<|channel|>analysis": ("<|return|>", "<|call|>"),
}
"""Tokens that end a turn, by a mark in the template, for families where it cannot be derived."""

WAYS: Sequence[Role | None] = ("user", "tool", "system", "assistant", None)
"""Whose message comes next; None if the model is asked for another turn at once."""


class Way(NamedTuple):
    """A kind of turn, and who comes next."""

    calls: bool
    next: Role | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a turn ends when it goes on some way."""

    lead: str
    """Text before the closing token that still belongs to the turn."""
    close: int
    """The closing token."""
    mark: str
    """Its text."""
    sure: bool
    """Whether it ends a turn whoever is next, so that sampling may stop at it."""


class Tails:
    """Cuts out what follows a turn."""

    def __init__(
        self,
        template: ChatTemplate,
        arguments: Mapping[str, JsonValue],
        *,
        tools: bool,
        syntax: Sequence[str] = (),
    ) -> None:
        """`syntax` are tokens inside a turn, such as those around a tool call."""
        self._template = template
        self._arguments = arguments
        self._kinds = Kinds()
        self._probe_tools = (TOOL,) if tools else ()
        known = [text for mark, ends in ENDS.items() if mark in template.source for text in ends]
        ids = (template.token_id(text) for text in known)
        self.stop_ids = tuple(
            dict.fromkeys([*template.eos_ids, *(i for i in ids if i is not None)])
        )
        """Where sampling ends."""
        self._atoms = template.atoms - {template.token_id(text) for text in syntax}
        self._call_text = self._text_beside_calls()
        ways = [Way(calls, next) for calls in (False, True) for next in WAYS]
        found = {way: self._ending(way) for way in ways}
        self.endings = {way: ending for way, ending in found.items() if ending is not None}
        closes = [ending.close for ending in self.endings.values() if ending.sure]
        self.stop_ids = tuple(dict.fromkeys([*self.stop_ids, *closes]))

    def after(
        self, turn: Message, messages: Sequence[Message], tools: Sequence[JsonValue]
    ) -> list[int]:
        """The ids after a turn, from its closing token to the start of the next turn.

        Raises:
            RequestError: the template does not end a turn in this place.
        """
        texts = texts_of(turn, messages)
        kind = None
        if not self._template.tells_time:
            kind = self._kinds.of(turn, messages, tools, texts)
        frame = kind.fitting(texts) if kind else None
        if frame is not None:
            ids = frame.ids(texts, self._template.encode)
        else:
            ids = self._template.encode(self._from_close(turn, messages, tools))
            if kind and kind.worth_a_try():
                kind.frames += self._frames(turn, messages, tools)
        if ids[:1] != [self.endings[way_of(turn, messages)].close]:
            raise RequestError("the chat template does not close the assistant's turn here")
        return ids

    def _frames(
        self, turn: Message, messages: Sequence[Message], tools: Sequence[JsonValue]
    ) -> Sequence[Frame]:
        """What is written around the texts of this tail; nothing if they may change it."""
        mark = self.endings[way_of(turn, messages)].mark
        texts = texts_of(turn, messages)
        drawn, asked = sketches(texts)
        encode = self._template.encode
        try:
            sketched = self._conversation(*with_texts(turn, messages, cast(list[str], drawn)))
            parts = self._template.sketch(sketched, tools, self._arguments)
            frame = frame_of(_from_mark(parts, mark), asked, self._template.seams, encode)
            for trial in (texts, *_awkward(texts, mark)):
                text = self._from_close(*with_texts(turn, messages, trial), tools)
                if frame.fits(trial) and frame.ids(trial, encode) != encode(text):
                    return ()
        except (OpaqueError, RequestError):
            return ()
        return (frame,)

    def _from_close(
        self, turn: Message, messages: Sequence[Message], tools: Sequence[JsonValue]
    ) -> str:
        text = self._behind_stand_in(turn, messages, tools)
        ending = self.endings.get(way_of(turn, messages))
        if ending is None:
            raise RequestError("the chat template does not end the assistant's turn here")
        lead, mark, rest = text.partition(ending.mark)
        if not mark or not self._ends_turn(turn, lead, ending):
            raise RequestError("the chat template does not close the assistant's turn here")
        return mark + rest

    def _ends_turn(self, turn: Message, lead: str, ending: Ending) -> bool:
        """Whether text before the closing token is the turn's own; after calls it may name them."""
        if not turn.tool_calls:
            return lead == ending.lead
        return not any(id in self._atoms for id in self._template.encode(lead))

    def _behind_stand_in(
        self, turn: Message, messages: Sequence[Message], tools: Sequence[JsonValue]
    ) -> str:
        text = self._template.render(
            self._conversation(turn, messages),
            tools,
            add_generation_prompt=True,
            arguments=self._arguments,
        )
        _, found, rest = text.rpartition(STAND_IN)
        if not found:
            raise RequestError("the chat template does not show the assistant's turn")
        return rest

    def _conversation(self, turn: Message, messages: Sequence[Message]) -> list[Message]:
        calls = tuple([call._replace(arguments=STAND_IN_ARGUMENTS) for call in turn.tool_calls])
        stand_in = Message("assistant", self._call_text if calls else STAND_IN, calls)
        return [QUESTION, stand_in, *messages]

    def _text_beside_calls(self) -> str:
        """Content for a stand-in with calls: none, unless the template shows nothing else of it."""
        self._call_text = ""
        try:
            self._behind_stand_in(_stand_in(calls=True), [_message("tool")], self._probe_tools)
        except RequestError:
            return STAND_IN
        return ""

    def _ending(self, way: Way) -> Ending | None:
        """How a turn ends on some way, or None if the template does not go there."""
        turn = _stand_in(calls=way.calls)
        after = [_message(way.next)] if way.next else []
        try:
            text = self._behind_stand_in(turn, after, self._probe_tools if way.calls else ())
        except RequestError:
            return None
        region = text.partition(NEXT)[0]
        ids = self._template.encode(region)
        alone = self._template.encode(self._alone(turn))
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(ids, alone, strict=False))
        common = [id for id, _ in shared if id in self._atoms]
        known = [id for id in ids if id in self.stop_ids]
        atoms = [id for id in ids if id in self._atoms]
        if not atoms:
            return None
        close = known[0] if known else common[-1] if common else atoms[0]
        mark = self._template.token_text(close)
        return Ending(region.partition(mark)[0], close, mark, sure=bool(known or common))

    def _alone(self, turn: Message) -> str:
        """What follows a turn that is the last of a conversation."""
        content = self._call_text if turn.tool_calls else STAND_IN
        try:
            text = self._template.render(
                [QUESTION, turn._replace(content=content)],
                self._probe_tools if turn.tool_calls else (),
                add_generation_prompt=False,
                arguments=self._arguments,
            )
        except RequestError:
            return ""
        return text.rpartition(STAND_IN)[2]


def way_of(turn: Message, messages: Sequence[Message]) -> Way:
    """The way a conversation goes on after a turn."""
    return Way(bool(turn.tool_calls), messages[0].role if messages else None)


def _stand_in(*, calls: bool) -> Message:
    made = (ToolCall("call_1", "calculator", STAND_IN_ARGUMENTS),) if calls else ()
    return Message("assistant", STAND_IN, made)


def _message(role: Role) -> Message:
    return Message(role, NEXT, tool_call_id="call_1" if role == "tool" else "")


def _from_mark(parts: Sequence[Part], mark: str) -> list[Part]:
    """What was written after the stand-in, from the token that closes its turn."""
    for at in reversed(range(len(parts))):
        part = parts[at]
        if isinstance(part, str) and STAND_IN in part:
            _, found, rest = part.rpartition(STAND_IN)[2].partition(mark)
            if found:
                return [found + rest, *parts[at + 1 :]]
            break
    raise OpaqueError


def _awkward(texts: Sequence[str], mark: str) -> list[list[str]]:
    """Texts that show what a template or a tokenizer might do to some, equal where these are."""
    numbers = [texts.index(text) for text in texts]
    made = (
        [f'{mark[1:]}"\\&<é東🙂{mark}<think>{n}</think>{mark[:-1]}' for n in numbers],
        [f" \t{n}{mark}\n " for n in numbers],
    )
    return [[new if old else "" for new, old in zip(trial, texts, strict=True)] for trial in made]
