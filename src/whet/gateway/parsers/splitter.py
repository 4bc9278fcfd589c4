"""Text into thinking, content and calls: whole, or as it comes.

What may still be something else is held back, so that what a stream has sent is always the
beginning of the whole message.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from pydantic import JsonValue

from whet.gateway.messages import Message
from whet.gateway.parsers.headed import MESSAGE, START, HeadedParser
from whet.gateway.parsers.parser import ToolParser
from whet.gateway.parsers.reasoning import Reasoning


class Delta(NamedTuple):
    """Some more of a message."""

    content: str = ""
    reasoning: str = ""


class Kind(Enum):
    """What a part of a turn is."""

    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


class Splitter(Protocol):
    """Reads one message."""

    def feed(self, text: str) -> Delta:
        """Take more text; returns what may go out now."""
        ...

    def whole(self, text: str, tools: Sequence[JsonValue]) -> Message:
        """The message of a text of which nothing was fed before."""
        ...


def marker_start(text: str, marker: str) -> int:
    """Where a marker starts, or may start once more text comes; the end if nowhere."""
    found = text.find(marker)
    if found >= 0:
        return found
    tails = range(max(0, len(text) - len(marker) + 1), len(text))
    return next((i for i in tails if marker.startswith(text[i:])), len(text))


def first_start(text: str, markers: Sequence[str]) -> int:
    """Where the first of several markers starts or may start."""
    return min((marker_start(text, marker) for marker in markers), default=len(text))


class InlineSplitter(Splitter):
    """Thinking between two marks, then content, then perhaps tool calls.

    New lines next to the marks belong to the marks. `hidden` are special tokens that may be left
    over where nothing reads them; they are no content.
    """

    def __init__(
        self,
        reasoning: Reasoning,
        parser: ToolParser | None,
        *,
        opened: bool,
        hidden: Sequence[str] = (),
    ) -> None:
        self._format = reasoning
        self._parser = parser
        self._hidden = hidden
        self._markers = (*(parser.format.markers if parser else ()), *hidden)
        self._starts = tuple(parser.format.starts) if parser else ()
        self._opened = opened
        # A function, not a bound method: that would lead back here, a cycle with every reply.
        self._step: Callable[[InlineSplitter], None]
        self._step = InlineSplitter._begin if reasoning.open else InlineSplitter._answer
        self._pending = ""
        self._thought: list[str] = []
        self._said: list[str] = []
        self._after_thinking = False

    def feed(self, text: str) -> Delta:
        self._pending += text
        thought, said = len(self._thought), len(self._said)
        step = None
        while step != self._step:
            step = self._step
            step(self)
        return Delta("".join(self._said[said:]), "".join(self._thought[thought:]))

    def whole(self, text: str, tools: Sequence[JsonValue]) -> Message:
        thought, said = self._thinking(text)
        parsed = self._parser.parse(said, tools) if self._parser else None
        content, calls = parsed or (said, ())
        for token in self._hidden:
            content = content.replace(token, "")
        return Message("assistant", content, calls, reasoning=thought)

    def _thinking(self, text: str) -> tuple[str, str]:
        """The thinking in a whole text, and what is said after it."""
        if not self._format.open:
            return "", text
        begun = text.lstrip()
        if begun.startswith(self._format.open):
            text = begun[len(self._format.open) :]
        elif not self._opened:
            return "", text
        thought, _, said = text.partition(self._format.close)
        return thought.strip("\n"), said.lstrip("\n")

    def _begin(self) -> None:
        """Nothing is known yet but perhaps white space."""
        text = self._pending.lstrip()
        if text.startswith(self._format.open):
            self._pending = text[len(self._format.open) :]
            self._step = InlineSplitter._think
        elif not self._format.open.startswith(text):
            self._step = InlineSplitter._think if self._opened else InlineSplitter._answer

    def _think(self) -> None:
        if not self._thought:
            self._pending = self._pending.lstrip("\n")
        close = self._format.close
        start = marker_start(self._pending, close)
        thought = self._pending[:start].rstrip("\n")
        if thought:
            self._thought.append(thought)
        if self._pending.startswith(close, start):
            self._pending = self._pending[start + len(close) :]
            self._after_thinking = True
            self._step = InlineSplitter._answer
        else:
            self._pending = self._pending[len(thought) :]

    def _answer(self) -> None:
        if self._after_thinking and not self._said:
            self._pending = self._pending.lstrip("\n")
        if self._may_start_a_call():
            return
        start = first_start(self._pending, self._markers)
        said = self._pending[:start]
        if self._markers or self._starts:
            said = said.rstrip()
        if said:
            self._said.append(said)
        self._pending = self._pending[len(said) :]
        if any(self._pending.lstrip().startswith(marker) for marker in self._markers):
            self._step = InlineSplitter._hold

    def _may_start_a_call(self) -> bool:
        if self._said or not self._starts:
            return False
        text = self._pending.lstrip()
        if any(text.startswith(start) for start in self._starts):
            self._step = InlineSplitter._hold
            return True
        return not text or any(start.startswith(text) for start in self._starts)

    def _hold(self) -> None:
        """Perhaps a call: known only at the end."""


class HeadedSplitter(Splitter):
    """Messages with headers, of which only thinking and content go out as they grow."""

    def __init__(self, parser: HeadedParser, *, calls_tools: bool) -> None:
        self._parser = parser
        self._calls_tools = calls_tools
        self._ends = (*parser.ends, START)
        self._pending = ""
        self._kind: Kind | None = None
        """Of the message that is being read; None in a header."""
        self._begun: set[Kind] = set()

    def feed(self, text: str) -> Delta:
        self._pending += text
        out: dict[Kind, list[str]] = {kind: [] for kind in Kind}
        while self._step(out):
            pass
        return Delta("".join(out[Kind.CONTENT]), "".join(out[Kind.REASONING]))

    def whole(self, text: str, tools: Sequence[JsonValue]) -> Message:
        if MESSAGE not in text:
            return Message("assistant", self._bare(text))
        parsed = self._parser.parse(text, tools) if self._calls_tools else None
        bodies: dict[Kind, list[str]] = {kind: [] for kind in Kind}
        for header, body in self._parser.messages(text):
            bodies[self._kind_of(header)].append(body)
        # A call that cannot be read is content, after whatever a stream has sent by then.
        lost = [] if parsed else bodies[Kind.CALL]
        content = "\n".join([*bodies[Kind.CONTENT], *lost])
        thought = "\n".join(bodies[Kind.REASONING])
        return Message("assistant", content, parsed.calls if parsed else (), reasoning=thought)

    def _step(self, out: dict[Kind, list[str]]) -> bool:
        """Read on to the end of a header or a message; False if there is none yet."""
        if self._kind is None:
            header, found, rest = self._pending.partition(MESSAGE)
            if found:
                self._pending = rest
                self._kind = self._kind_of(header)
                out[self._kind].append("\n" if self._kind in self._begun else "")
                self._begun.add(self._kind)
            return bool(found)
        start = first_start(self._pending, self._ends)
        out[self._kind].append(self._pending[:start])
        self._pending = self._pending[start:]
        end = next((end for end in self._ends if self._pending.startswith(end)), None)
        if end is not None:
            self._pending = self._pending[len(end) :]
            self._kind = None
        return end is not None

    def _kind_of(self, header: str) -> Kind:
        if self._parser.recipient(header):
            return Kind.CALL
        return Kind.REASONING if self._parser.thinks.search(header) else Kind.CONTENT

    def _bare(self, text: str) -> str:
        for token in self._parser.format.tokens:
            text = text.replace(token, "")
        return text
