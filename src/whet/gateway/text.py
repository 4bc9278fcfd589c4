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
    sight = _sight(renderer, tools, as_text)
    text = renderer.template.decode_all(sight.visible(ids))
    if sampling.stop:
        ends = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
        text = text[: min(ends, default=len(text))]
    splitter = _splitter(renderer, sight, tools=tools, prompt=prompt, as_text=as_text)
    return splitter.whole(text, schemas)


class _Sight(NamedTuple):
    """Which special tokens are seen."""

    hidden: frozenset[int]
    shown: tuple[str, ...]
    headed: HeadedParser | None
    """What else tells the parts of a turn apart, if it is not marks in the text."""

    def visible(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids that are text, or that the formats look for."""
        # Mostly the last one alone is neither.
        said = ids[:-1] if ids and ids[-1] in self.hidden else ids
        if self.hidden.isdisjoint(said):
            return said
        return [id for id in said if id not in self.hidden]


@lru_cache(maxsize=64)
def _sight(renderer: Renderer, tools: bool, as_text: bool) -> _Sight:
    headed = renderer.parser if isinstance(renderer.parser, HeadedParser) and not as_text else None
    words = [*renderer.parser.format.tokens] if headed or (tools and not as_text) else []
    if not as_text and not headed:
        words += [renderer.reasoning.open, renderer.reasoning.close]
    special = renderer.template.special
    shown = {id: text for id, text in special.items() if any(text in word for word in words)}
    hidden = frozenset((*special, *renderer.stop_ids)) - frozenset(shown)
    return _Sight(hidden, tuple(text for text in shown.values() if text), headed)


def _splitter(
    renderer: Renderer, sight: _Sight, *, tools: bool, prompt: Sequence[int], as_text: bool
) -> Splitter:
    """Reads the text of one generation."""
    if as_text:
        return InlineSplitter(NONE, None, opened=False, hidden=sight.shown)
    if sight.headed is not None:
        return HeadedSplitter(sight.headed, calls_tools=tools)
    return InlineSplitter(
        renderer.reasoning,
        renderer.parser if tools else None,
        opened=renderer.opens(prompt) if prompt else renderer.opens_thinking,
        hidden=sight.shown,
    )


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
        self._sight = _sight(renderer, tools, as_text)
        self._splitter = _splitter(
            renderer, self._sight, tools=tools, prompt=prompt, as_text=as_text
        )
        self._decode = renderer.template.decode_all
        self._stops = sampling.stop
        self._ids: list[int] = []
        self._known = ""
        """The text of those ids that have gone out."""
        self._held = ""
        self._stopped = False
        self._content = 0
        self._reasoning = 0

    def feed(self, ids: Sequence[int]) -> Delta:
        """Take new ids; returns the text that may go out now."""
        delta = self._splitter.feed(self._until_stop(self._new_text(ids)))
        self._content += len(delta.content)
        self._reasoning += len(delta.reasoning)
        return delta

    def finish(self, message: Message) -> Delta:
        """What is left to send of the whole message, which is nothing then."""
        rest = Delta(message.content[self._content :], message.reasoning[self._reasoning :])
        self._content, self._reasoning = len(message.content), len(message.reasoning)
        return rest

    def _new_text(self, ids: Sequence[int]) -> str:
        """The whole characters that these ids complete."""
        self._ids += self._sight.visible(ids)
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
