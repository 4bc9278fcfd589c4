"""Sampled ids to the message an agent sees, whole or as it grows."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pydantic import JsonValue

from whet.gateway.messages import Message
from whet.gateway.parsers.headed import HeadedParser
from whet.gateway.parsers.reasoning import NONE
from whet.gateway.parsers.splitter import (
    Delta,
    HeadedSplitter,
    InlineSplitter,
    Splitter,
    first_start,
)
from whet.gateway.render import Renderer
from whet.types import Sampling

__all__ = ["Delta", "TextStream", "read_message"]

OVERLAP = 4
"""Ids decoded again: a character may span tokens, and some decoders drop the first space."""
WINDOW = 24
"""Ids that are decoded at most, unless they are half a character."""


def read_message(
    renderer: Renderer,
    ids: Sequence[int],
    sampling: Sampling,
    *,
    tools: bool,
    schemas: Sequence[JsonValue] = (),
    prompt: Sequence[int] = (),
    as_text: bool = False,
) -> Message:
    """The assistant message of a finished generation.

    `tools` says whether tool calls are looked for; `schemas` are the request's, which give types
    to arguments that were written without. `prompt` is what was sampled from, where it is known.
    `as_text` takes everything as content, for requests that were no conversation.
    """
    reader = _Reader(renderer, tools=tools, prompt=prompt, as_text=as_text)
    text = renderer.template.decode_all(reader.visible(ids))
    ends = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
    reader.splitter.feed(text[: min(ends)] if ends else text)
    return reader.splitter.message(schemas)


class _Sight(NamedTuple):
    """Which special tokens are seen."""

    hidden: frozenset[int]
    shown: tuple[str, ...]


@lru_cache(maxsize=64)
def _sight(renderer: Renderer, tools: bool, thinking: bool) -> _Sight:
    words = [*renderer.parser.format.tokens] if tools else []
    if thinking:
        words += [renderer.reasoning.open, renderer.reasoning.close]
    if thinking and isinstance(renderer.parser, HeadedParser):
        words = [*renderer.parser.format.tokens]
    special = renderer.template.special
    shown = {id: text for id, text in special.items() if any(text in word for word in words)}
    hidden = frozenset((*special, *renderer.stop_ids)) - frozenset(shown)
    return _Sight(hidden, tuple(text for text in shown.values() if text))


class _Reader:
    """How the text of one generation is to be read."""

    def __init__(
        self, renderer: Renderer, *, tools: bool, prompt: Sequence[int], as_text: bool
    ) -> None:
        self._sight = _sight(renderer, tools and not as_text, not as_text)
        self.splitter: Splitter
        if isinstance(renderer.parser, HeadedParser) and not as_text:
            self.splitter = HeadedSplitter(renderer.parser, calls_tools=tools)
            return
        opened = renderer.opens(prompt) if prompt else renderer.opens_thinking
        self.splitter = InlineSplitter(
            NONE if as_text else renderer.reasoning,
            renderer.parser if tools and not as_text else None,
            opened=opened and not as_text,
            hidden=self._sight.shown,
        )

    def visible(self, ids: Sequence[int]) -> list[int]:
        """The ids that are text, or that the formats look for."""
        return [id for id in ids if id not in self._sight.hidden]


class TextStream:
    """A message as it grows.

    What may turn out to be a tool call or a stop string is kept back; `finish` gives the rest
    once the whole message is known, so that a streamed reply reads like the whole one.
    """

    def __init__(
        self,
        renderer: Renderer,
        sampling: Sampling,
        *,
        tools: bool,
        prompt: Sequence[int] = (),
        as_text: bool = False,
    ) -> None:
        self._reader = _Reader(renderer, tools=tools, prompt=prompt, as_text=as_text)
        self._decode = renderer.template.decode_all
        self._stops = sampling.stop
        self.length = 0
        """Of all the ids it was given."""
        self._ids: list[int] = []
        self._known = ""
        """The text of those ids that have gone out."""
        self._held = ""
        self._stopped = False
        self._content = 0
        self._reasoning = 0

    def feed(self, ids: Sequence[int]) -> Delta:
        """Take new ids; returns the text that may go out now."""
        self.length += len(ids)
        delta = self._reader.splitter.feed(self._until_stop(self._new_text(ids)))
        self._content += len(delta.content)
        self._reasoning += len(delta.reasoning)
        return delta

    def finish(self, message: Message) -> Delta:
        """What is left to send of the whole message."""
        return Delta(message.content[self._content :], message.reasoning[self._reasoning :])

    def _new_text(self, ids: Sequence[int]) -> str:
        """The whole characters that these ids complete."""
        self._ids += self._reader.visible(ids)
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new, self._known = text[len(self._known) :], text
        if len(self._ids) > WINDOW:
            del self._ids[:-OVERLAP]
            self._known = self._decode(self._ids)
        return new

    def _until_stop(self, text: str) -> str:
        """The text before a stop string, without what may become one."""
        if self._stopped or not self._stops:
            return "" if self._stopped else text
        self._held += text
        start = first_start(self._held, self._stops)
        ready, self._held = self._held[:start], self._held[start:]
        self._stopped = any(self._held.startswith(stop) for stop in self._stops)
        return ready
