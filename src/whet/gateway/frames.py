"""What is the same in every tail of a kind: rendered and encoded once, then only filled in.

Nearly always a turn is followed by one message of a user or by the results of tools, and all that
differs is their text. Such tails are put together from a frame; it stands for the rendering of
every text that answers the template's questions in the same way.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from pydantic import JsonValue

from whet.gateway import strictjson
from whet.gateway.messages import Message
from whet.gateway.seams import Seams
from whet.gateway.sketch import Part, Question, Slot

KINDS = 256
"""Kinds of tails whose frames are kept."""
TRIES = 4
"""Frames of a kind: the answers to the template's questions differ, but not often."""
MOST_TEXTS = 32

Encode = Callable[[str], list[int]]


class Stretch(NamedTuple):
    """A part of a tail: text to be encoded, and the ids that always follow it."""

    parts: Sequence[Part]
    after: Sequence[int]


class Frame(NamedTuple):
    """A tail without its texts."""

    questions: Sequence[Question]
    before: Sequence[int]
    stretches: Sequence[Stretch]

    def fits(self, texts: Sequence[str]) -> bool:
        """Whether the template would write this around these texts, which are of its kind."""
        return not self.questions or all(q.answered_by(texts) for q in self.questions)

    def ids(self, texts: Sequence[str], encode: Encode) -> list[int]:
        """The tail with these texts in it."""
        ids = list(self.before)
        for parts, after in self.stretches:
            ids += encode(join(parts, texts))
            ids += after
        return ids


class Kind:
    """Tails that differ by their texts alone, and in the same of which there is no text."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._seen = False
        self._tries = TRIES

    def fitting(self, texts: Sequence[str]) -> Frame | None:
        """The frame that these texts belong in."""
        for frame in self.frames:
            if frame.fits(texts):
                return frame
        return None

    def worth_a_try(self) -> bool:
        """Whether to look for a frame; not for what came but once."""
        seen, self._seen = self._seen, True
        self._tries -= seen
        return seen and self._tries >= 0


class Kinds:
    """Kinds of tails by what is the same in them, those asked for lately."""

    def __init__(self) -> None:
        self._kind = lru_cache(KINDS)(_new_kind)

    def of(
        self,
        turn: Message,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        texts: Sequence[str],
    ) -> Kind | None:
        """The kind of a tail with these texts; None if it is an unusual one."""
        if len(texts) > MOST_TEXTS:
            return None
        roles: list[str] = []
        for message in messages:
            if message.tool_calls or message.reasoning:
                return None
            roles.append(message.role)
        names = tuple([call.name for call in turn.tool_calls])
        digest = _digest(tools) if tools else b""
        return self._kind(names, tuple(roles), tuple(map(bool, texts)), digest)


def _new_kind(
    _names: Sequence[str], _roles: Sequence[str], _filled: Sequence[bool], _tools: bytes
) -> Kind:
    return Kind()


def _digest(tools: Sequence[JsonValue]) -> bytes:
    # Not by equality, to which the order of keys is nothing, and 1 the same as true.
    return blake2b(strictjson.dumps(list(tools)), digest_size=16).digest()


def texts_of(turn: Message, messages: Sequence[Message]) -> list[str]:
    """The texts in a tail that a frame has slots for."""
    texts = [call.id for call in turn.tool_calls]
    for message in messages:
        texts += (message.content, message.tool_call_id)
    return texts


def with_texts(
    turn: Message, messages: Sequence[Message], texts: Iterable[str]
) -> tuple[Message, list[Message]]:
    """The same turn and messages with other texts."""
    left = iter(texts)
    calls = tuple(call._replace(id=next(left)) for call in turn.tool_calls)
    others = [m._replace(content=next(left), tool_call_id=next(left)) for m in messages]
    return turn._replace(tool_calls=calls), others


def join(parts: Sequence[Part], texts: Sequence[str]) -> str:
    """Parts with texts in their slots."""
    return "".join([p if isinstance(p, str) else p.text(texts) for p in parts])


def frame_of(
    parts: Sequence[Part], questions: Sequence[Question], seams: Seams, encode: Encode
) -> Frame:
    """The frame of a tail that a template wrote; as much of it as may be is encoded now."""
    before: Sequence[int] = ()
    stretches: list[Stretch] = []
    open: list[Part] = []
    for at, part in enumerate(parts):
        found = () if isinstance(part, Slot) else seams.find(part)
        if isinstance(part, Slot) or not found:
            open.append(part)
            continue
        start, end = found[0], found[-1] if at < len(parts) - 1 else len(part)
        if at == 0:
            before, open = encode(part[:end]), [part[end:]]
            continue
        stretches.append(Stretch((*open, part[:start]), encode(part[start:end])))
        open = [part[end:]]
    if any(open):
        stretches.append(Stretch(open, ()))
    return Frame(tuple(dict.fromkeys(questions)), before, stretches)
