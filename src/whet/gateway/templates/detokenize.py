"""Decode sampled ids to the assistant message that an agent gets, whole or as a stream.

Ids become text, and incremental parsers split the text into thinking, content and tool calls. Text
that may still turn out to be a tag, a call or a stop string is held back, so that the text a stream
has sent is always a prefix of the whole message.
"""

from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple, Protocol

from pydantic import JsonValue

from whet.gateway.messages import Message
from whet.gateway.parsers.formats import NO_REASONING, ReasoningFormat
from whet.gateway.parsers.harmony import MESSAGE, START, HarmonyParser
from whet.gateway.parsers.parser import ToolParser
from whet.gateway.templates.chat_template import remove_words
from whet.gateway.templates.renderer import Renderer
from whet.types import Sampling

OVERLAP = 4
"""Ids decoded again: a character may span tokens, and some decoders drop the first space."""
WINDOW = 24
"""Maximum number of ids decoded at once; a run of bytes may be longer."""


class IncrementalDecoder:
    """Decodes ids as they come to whole characters, of which one may span several ids."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], byte_ids: Collection[int] = ()
    ) -> None:
        """`byte_ids` are those of `ChatTemplate`."""
        self._decode = decode
        self._byte_ids = byte_ids
        self._ids: list[int] = []
        """The latest ids; earlier ones do not change the text any more."""
        self._decoded = ""
        """The text of `_ids` that was returned already."""

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete; empty while the last character is not whole."""
        self._ids += ids
        if self._ids and self._ids[-1] in self._byte_ids:
            return ""  # a run of bytes is text only if all of it is UTF-8: wait for its end
        text = self._decode_whole()
        new, self._decoded = text[len(self._decoded) :], text
        if len(self._ids) > WINDOW:
            del self._ids[:-OVERLAP]
            self._decoded = self._decode_whole()
        return new

    def _decode_whole(self) -> str:
        """Decode the ids without a last character that the next one may complete."""
        return self._decode(self._ids).removesuffix("\ufffd")

    def finish(self) -> str:
        """Return the rest of the text, with a character that was never completed."""
        return self._decode(self._ids)[len(self._decoded) :]


class Delta(NamedTuple):
    """New text of a message."""

    content: str = ""
    reasoning: str = ""


class MessageParser(Protocol):
    """Parse one message, either incrementally or whole."""

    def feed(self, text: str) -> Delta:
        """Add text; returns what may be sent now."""
        ...

    def parse(self, text: str, tools: Sequence[JsonValue]) -> Message:
        """Parse the whole text of a message; nothing may have been fed before."""
        ...


def decode_message(
    renderer: Renderer,
    ids: Sequence[int],
    sampling: Sampling,
    *,
    parse_calls: bool,
    tools: Sequence[JsonValue] = (),
    prompt: Sequence[int] = (),
    as_text: bool = False,
) -> Message:
    """Decode a finished generation to an assistant message.

    `tools` are those of the request, which give types to untyped arguments. `prompt` is the prompt,
    if known. `as_text` takes all text as content, for raw completions.
    """
    visibility = _find_visible_tokens(renderer, parse_calls, as_text)
    text = renderer.template.decode_all(visibility.filter(ids))
    if sampling.stop:
        ends = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
        text = text[: min(ends, default=len(text))]
    parser = _create_parser(
        renderer, visibility, parse_calls=parse_calls, prompt=prompt, as_text=as_text
    )
    return parser.parse(text, tools)


class StreamDecoder:
    """Decode a message incrementally.

    Text that may turn out to be a tool call or a stop string is held back; `finish` returns the
    rest once the whole message is known, so that the stream adds up to the whole message.
    """

    def __init__(
        self,
        renderer: Renderer,
        sampling: Sampling,
        *,
        parse_calls: bool,
        prompt: Sequence[int] = (),
        as_text: bool = False,
    ) -> None:
        """The parameters are those of `decode_message`."""
        self._visibility = _find_visible_tokens(renderer, parse_calls, as_text)
        self._parser = _create_parser(
            renderer, self._visibility, parse_calls=parse_calls, prompt=prompt, as_text=as_text
        )
        self._decoder = IncrementalDecoder(renderer.template.decode_all, renderer.template.byte_ids)
        self._stops = sampling.stop
        self._pending = ""
        """Text that may become a stop string."""
        self._stopped = False
        self._sent_content = self._sent_reasoning = 0  # characters

    def feed(self, ids: Sequence[int]) -> Delta:
        """Add sampled ids; returns the text that may be sent now."""
        text = self._decoder.feed(self._visibility.filter(ids))
        delta = self._parser.feed(self._cut_at_stop(text))
        self._sent_content += len(delta.content)
        self._sent_reasoning += len(delta.reasoning)
        return delta

    def finish(self, message: Message) -> Delta:
        """Return the unsent rest of the message and mark it sent."""
        rest = Delta(
            message.content[self._sent_content :], message.reasoning[self._sent_reasoning :]
        )
        self._sent_content, self._sent_reasoning = len(message.content), len(message.reasoning)
        return rest

    def _cut_at_stop(self, text: str) -> str:
        """Return the text before a stop string, without what may become one."""
        if self._stopped or not self._stops:
            return "" if self._stopped else text
        self._pending += text
        start = find_first_marker(self._pending, self._stops)
        ready, self._pending = self._pending[:start], self._pending[start:]
        self._stopped = any(self._pending.startswith(stop) for stop in self._stops)
        return ready


class _Visibility(NamedTuple):
    """Which special tokens are decoded."""

    hidden: frozenset[int]
    """Ids that are not decoded."""
    shown: tuple[str, ...]
    """Special tokens that are decoded, since parsers look for them."""
    harmony: HarmonyParser | None
    """The parser of a format with headers, or None if thinking and calls are marked by tags."""

    def filter(self, ids: Sequence[int]) -> list[int]:
        """Return the ids to decode."""
        return [id for id in ids if id not in self.hidden]


@lru_cache(maxsize=64)
def _find_visible_tokens(renderer: Renderer, parse_calls: bool, as_text: bool) -> _Visibility:
    parser = renderer.parser
    harmony = parser if isinstance(parser, HarmonyParser) and not as_text else None
    syntax = [*parser.format.special_tokens] if harmony or (parse_calls and not as_text) else []
    if not as_text and not harmony:
        syntax += [renderer.reasoning.open, renderer.reasoning.close, *parser.format.content_tags]
    special = renderer.template.special_tokens
    shown = {id: text for id, text in special.items() if any(text in word for word in syntax)}
    hidden = frozenset((*special, *renderer.stop_ids)) - frozenset(shown)
    return _Visibility(hidden, tuple(text for text in shown.values() if text), harmony)


def _create_parser(
    renderer: Renderer,
    visibility: _Visibility,
    *,
    parse_calls: bool,
    prompt: Sequence[int],
    as_text: bool,
) -> MessageParser:
    """Create the parser of one generation."""
    if visibility.harmony is not None:
        return HarmonyMessageParser(visibility.harmony, parse_calls=parse_calls)
    reasoning = NO_REASONING if as_text else renderer.reasoning
    in_thinking = bool(reasoning.open) and (
        renderer.ends_in_thinking(prompt) if prompt else renderer.prompt_opens_thinking
    )
    parser = renderer.parser if parse_calls and not as_text else None
    format = renderer.parser.format
    return InlineMessageParser(
        reasoning,
        parser,
        in_thinking=in_thinking,
        removed=visibility.shown,
        tags=() if as_text else format.content_tags,
        prefix="" if as_text else format.content_prefix,
    )


def find_marker(text: str, marker: str) -> int:
    """Index at which a marker starts, or may start once more text comes; else the length."""
    found = text.find(marker)
    if found >= 0:
        return found
    ends = range(max(0, len(text) - len(marker) + 1), len(text))
    return next((i for i in ends if marker.startswith(text[i:])), len(text))


def find_first_marker(text: str, markers: Sequence[str]) -> int:
    """Index at which the first of several markers starts or may start; else the length."""
    return min((find_marker(text, marker) for marker in markers), default=len(text))


class InlineMessageParser(MessageParser):
    """Parse thinking between two tags, then content, then perhaps tool calls.

    New lines next to the tags belong to the tags. `removed` are special tokens that are no content
    where no parser consumes them; `tags` stand around content, `prefix` before it.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat,
        parser: ToolParser | None,
        *,
        in_thinking: bool,
        removed: Sequence[str] = (),
        tags: Sequence[str] = (),
        prefix: str = "",
    ) -> None:
        """`in_thinking`: the prompt ends inside a thinking block."""
        self._reasoning = reasoning
        self._parser = parser
        self._removed = removed
        self._tags = tags
        self._prefix = prefix
        self._expected_prefix = prefix
        """The prefix until it was read."""
        self._markers = (*(parser.format.markers if parser else ()), *removed, *tags)
        self._starts = tuple(parser.format.starts) if parser else ()
        self._in_thinking = in_thinking
        # The state is a function, not a bound method, which would be a reference cycle per reply.
        self._state: Callable[[InlineMessageParser], None]
        if reasoning.open:
            self._state = InlineMessageParser._read_start
        else:
            self._state = InlineMessageParser._read_content
        self._pending = ""
        """Text that is not sent yet."""
        self._thinking: list[str] = []
        self._content: list[str] = []
        self._after_thinking = False

    def feed(self, text: str) -> Delta:
        self._pending += text
        thinking, content = len(self._thinking), len(self._content)
        state = None
        while state != self._state:  # until no state hands over to another
            state = self._state
            state(self)
        return Delta("".join(self._content[content:]), "".join(self._thinking[thinking:]))

    def parse(self, text: str, tools: Sequence[JsonValue]) -> Message:
        thinking, text = self._split_thinking(text)
        if self._parser and (parsed := self._parser.parse(remove_words(text, self._tags), tools)):
            content = remove_words(parsed.content, self._removed)
            return Message("assistant", content, parsed.calls, reasoning=thinking)
        content = remove_words(text.removeprefix(self._prefix), (*self._tags, *self._removed))
        return Message("assistant", content, reasoning=thinking)

    def _split_thinking(self, text: str) -> tuple[str, str]:
        """Split a whole text into thinking and the text after it."""
        if not self._reasoning.open:
            return "", text
        stripped = text.lstrip()
        if stripped.startswith(self._reasoning.open):
            text = stripped[len(self._reasoning.open) :]
        elif stripped.startswith(self._reasoning.close):  # no thinking: some models write no more
            text = stripped
        elif not self._in_thinking:
            return "", text
        thinking, closed, rest = text.partition(self._reasoning.close)
        if not closed and self._parser:  # a call ends thinking that was not closed
            marker = find_first_marker(thinking, self._parser.format.markers)
            if self._parser.parse(thinking[marker:]):
                thinking, rest = thinking[:marker], thinking[marker:]
        return thinking.strip("\n"), rest.lstrip("\n")

    def _read_start(self) -> None:
        """State: nothing but white space, or the start of a tag."""
        text = self._pending.lstrip()
        if text.startswith(self._reasoning.open):
            self._pending = text[len(self._reasoning.open) :]
            self._state = InlineMessageParser._read_thinking
        elif text.startswith(self._reasoning.close):
            self._pending = text
            self._state = InlineMessageParser._read_thinking
        elif not any(tag.startswith(text) for tag in (self._reasoning.open, self._reasoning.close)):
            self._state = (
                InlineMessageParser._read_thinking
                if self._in_thinking
                else InlineMessageParser._read_content
            )

    def _read_thinking(self) -> None:
        """State: inside a thinking block."""
        if not self._thinking:
            self._pending = self._pending.lstrip("\n")
        close = self._reasoning.close
        start = find_marker(self._pending, close)
        held = start
        if self._parser and not self._pending.startswith(close, start):  # maybe an unclosed block
            held = min(start, find_first_marker(self._pending, self._parser.format.markers))
        thinking = self._pending[:held].rstrip("\n")  # new lines may belong to the closing tag
        if thinking:
            self._thinking.append(thinking)
        if self._pending.startswith(close, start):
            self._pending = self._pending[start + len(close) :]
            self._after_thinking = True
            self._state = InlineMessageParser._read_content
        else:
            self._pending = self._pending[len(thinking) :]

    def _read_content(self) -> None:
        """State: content, up to what may be a tool call."""
        if self._after_thinking and not self._content:
            self._pending = self._pending.lstrip("\n")
        if self._may_start_with_call() or self._may_lack_prefix():
            return
        start = find_first_marker(self._pending, self._markers)
        content = self._pending[:start]
        if self._markers or self._starts:
            content = content.rstrip()  # white space before a call is not content
        if content:
            self._content.append(content)
        self._pending = self._pending[len(content) :]
        if any(self._pending.lstrip().startswith(marker) for marker in self._markers):
            self._state = InlineMessageParser._hold

    def _may_start_with_call(self) -> bool:
        """Whether the text so far may be a call of a format that starts without a marker."""
        if self._content or not self._starts:
            return False
        text = self._pending.lstrip()
        if any(text.startswith(start) for start in self._starts):
            self._state = InlineMessageParser._hold
            return True
        return not text or any(start.startswith(text) for start in self._starts)

    def _may_lack_prefix(self) -> bool:
        """Whether the text so far may be a call, since content would start with a prefix."""
        prefix, self._expected_prefix = self._expected_prefix, ""
        if self._pending.startswith(prefix):
            self._pending = self._pending[len(prefix) :]
            return False
        if prefix.startswith(self._pending):
            self._expected_prefix = prefix
            return True
        if self._parser:
            self._state = InlineMessageParser._hold
        return self._parser is not None

    def _hold(self) -> None:
        """State: perhaps a call, which is known only at the end; nothing more is sent."""


class BodyKind(Enum):
    """The kind of a harmony message."""

    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


class HarmonyMessageParser(MessageParser):
    """Parse harmony messages, of which only thinking and content are streamed."""

    def __init__(self, parser: HarmonyParser, *, parse_calls: bool) -> None:
        self._parser = parser
        self._parse_calls = parse_calls
        self._ends = (*parser.ends, START)
        self._pending = ""
        self._kind: BodyKind | None = None
        """Kind of the current body; None inside a header."""
        self._begun: set[BodyKind] = set()

    def feed(self, text: str) -> Delta:
        self._pending += text
        out: dict[BodyKind, list[str]] = {kind: [] for kind in BodyKind}
        while self._read_part(out):
            pass
        return Delta("".join(out[BodyKind.CONTENT]), "".join(out[BodyKind.REASONING]))

    def parse(self, text: str, tools: Sequence[JsonValue]) -> Message:
        if MESSAGE not in text:
            return Message("assistant", remove_words(text, self._parser.format.special_tokens))
        parsed = self._parser.parse(text, tools) if self._parse_calls else None
        bodies: dict[BodyKind, list[str]] = {kind: [] for kind in BodyKind}
        for header, body in self._parser.split_messages(text):
            bodies[self._find_kind(header)].append(body)
        # A malformed call is content, after everything that a stream has sent by then.
        malformed = [] if parsed else bodies[BodyKind.CALL]
        content = "\n".join([*bodies[BodyKind.CONTENT], *malformed])
        thinking = "\n".join(bodies[BodyKind.REASONING])
        return Message("assistant", content, parsed.calls if parsed else (), reasoning=thinking)

    def _read_part(self, out: dict[BodyKind, list[str]]) -> bool:
        """Read to the end of a header or body; False if its end has not come yet."""
        if self._kind is None:
            header, found, rest = self._pending.partition(MESSAGE)
            if found:
                self._pending = rest
                self._kind = self._find_kind(header)
                out[self._kind].append("\n" if self._kind in self._begun else "")
                self._begun.add(self._kind)
            return bool(found)
        start = find_first_marker(self._pending, self._ends)
        out[self._kind].append(self._pending[:start])
        self._pending = self._pending[start:]
        end = next((end for end in self._ends if self._pending.startswith(end)), None)
        if end is not None:
            self._pending = self._pending[len(end) :]
            self._kind = None
        return end is not None

    def _find_kind(self, header: str) -> BodyKind:
        if self._parser.read_recipient(header):
            return BodyKind.CALL
        thinks = self._parser.thinking_header.search(header)
        return BodyKind.REASONING if thinks else BodyKind.CONTENT
