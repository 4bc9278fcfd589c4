"""Sampled ids to the message an agent sees, whole or as it grows."""

from collections.abc import Sequence
from typing import NamedTuple

from whet.gateway.messages import Message
from whet.gateway.render import Renderer
from whet.gateway.toolcalls import OPEN, parse
from whet.types import Sampling


class Delta(NamedTuple):
    """Some more of a message."""

    content: str = ""
    reasoning: str = ""


def read_message(
    renderer: Renderer, ids: Sequence[int], sampling: Sampling, *, tools: bool
) -> Message:
    """The assistant message of a finished generation."""
    visible = ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids
    text = renderer.template.decode(visible)
    ends = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
    text = text[: min(ends)] if ends else text
    return parse(text) if tools else Message("assistant", text)


class TextStream:
    """A message as it grows.

    What may turn out to be a tool call or a stop string is kept back; `finish` gives the rest
    once the whole message is known, so that a streamed reply reads like the whole one.
    """

    def __init__(self, renderer: Renderer, sampling: Sampling, *, tools: bool) -> None:
        self._renderer = renderer
        self._markers = (*sampling.stop, *((OPEN,) if tools else ()))
        self._ids: list[int] = []
        self._from = 0
        self._held = ""
        self._sent = 0

    def feed(self, ids: Sequence[int]) -> Delta:
        """Take new ids; returns the text that may go out now."""
        self._ids += [id for id in ids if id not in self._renderer.stop_ids]
        decode = self._renderer.template.decode
        # Decode from a few ids back: a character may span tokens, and some decoders drop the
        # space before the first one.
        anchor = decode(self._ids[max(0, self._from - 4) : self._from])
        text = decode(self._ids[max(0, self._from - 4) :])
        if text.endswith("\ufffd"):
            return Delta()
        self._from = len(self._ids)
        self._held += text[len(anchor) :]
        ready = self._held[: self._hold_from()]
        self._held = self._held[len(ready) :]
        self._sent += len(ready)
        return Delta(ready)

    def finish(self, message: Message) -> Delta:
        """What is left to send of the whole message."""
        return Delta(message.content[self._sent :])

    def _hold_from(self) -> int:
        """Where a marker starts or may start; white space before it is kept back with it."""
        starts = [_marker_start(self._held, marker) for marker in self._markers]
        start = min(starts, default=len(self._held))
        return len(self._held[:start].rstrip()) if self._markers else start


def _marker_start(text: str, marker: str) -> int:
    found = text.find(marker)
    if found >= 0:
        return found
    tails = range(max(0, len(text) - len(marker) + 1), len(text))
    return next((i for i in tails if marker.startswith(text[i:])), len(text))
