"""One continuation being sampled: what it holds so far, and when it ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from whet.errors import PromptTooLong, RequestError
from whet.types import Piece, Sampling, StopReason

if TYPE_CHECKING:  # an engine without a model needs none of what grammars need
    from whet.engines.grammar import Matcher


Top = tuple[tuple[int, float], ...]
"""The likeliest tokens at a place, with their log-probabilities."""


def room_after(prompt: Sequence[int], context_length: int, vocabulary: int | None = None) -> int:
    """How many tokens fit in the context after a prompt.

    Raises:
        PromptTooLong: none does, or there is no prompt.
        RequestError: an id is none of the vocabulary, as far as that is known.
    """
    room = context_length - len(prompt)
    if room < 1 or not prompt:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens; this model's context holds "
            f"1 to {context_length - 1} and room for an answer"
        )
    if vocabulary is None and min(prompt) < 0:
        raise RequestError("the prompt has ids below 0")
    if vocabulary is not None and (min(prompt) < 0 or max(prompt) >= vocabulary):
        raise RequestError(f"the prompt has ids outside 0 to {vocabulary - 1}")
    return room


class Drawn(NamedTuple):
    """Some tokens with their log-probabilities, and the likeliest others if asked for."""

    tokens: list[int]
    logprobs: list[float]
    tops: Sequence[Top] = ()
    end: StopReason | None = None
    """Why nothing follows, where that is known already."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way to a generation."""

    tokens: list[int]
    """The prompt and what was sampled after it."""
    sampling: Sampling
    limit: int
    """Most tokens it may sample."""
    stream: bool
    seed: int
    """With the number of a token it decides what is drawn; 64 bits."""
    matcher: "Matcher | None" = None
    """Where it stands in its grammar, if it has one."""
    logprobs: list[float] = field(default_factory=list[float])
    """Of what was sampled."""
    tops: list[Top] = field(default_factory=list[Top])
    versions: list[int] = field(default_factory=list[int])
    delivered: int = 0

    @property
    def watched(self) -> bool:
        """Whether every token is to be looked at when it comes, not just the last."""
        asked = self.sampling
        return bool(self.stream or asked.stop or asked.top_logprobs or self.matcher is not None)

    def take(
        self, drawn: Drawn, version: int, decode: Callable[[Sequence[int]], str]
    ) -> Piece | None:
        """Add tokens, of which only the last may be the end; returns the piece that is due.

        Raises:
            RequestError: the grammar leaves no way on from here.
        """
        if self.matcher is not None:
            for token in drawn.tokens:
                self.matcher.advance(token)
        self.tokens += drawn.tokens
        self.logprobs += drawn.logprobs
        self.tops += drawn.tops
        self.versions += [version] * len(drawn.tokens)
        stop = (self._stop_reason(decode) if drawn.tokens else None) or drawn.end
        if not stop and not (self.stream and drawn.tokens):
            return None
        begin, self.delivered = self.delivered, len(self.logprobs)
        return Piece(
            tokens=tuple(self.tokens[begin - len(self.logprobs) :]),
            logprobs=tuple(self.logprobs[begin:]),
            versions=tuple(self.versions[begin:]),
            top=tuple(self.tops[begin:]),
            stop=stop,
        )

    def _stop_reason(self, decode: Callable[[Sequence[int]], str]) -> StopReason | None:
        if self.tokens[-1] in self.sampling.stop_ids:
            return "stop"
        if self.matcher is not None and self.matcher.finished:
            return "stop"
        if self.sampling.stop and self._stop_string(decode):
            return "stop"
        return "length" if len(self.logprobs) >= self.limit else None

    def _stop_string(self, decode: Callable[[Sequence[int]], str]) -> bool:
        # A token holds at least one byte, so a stop string that ends in the newest token
        # began no more than its own length in tokens ago.
        reach = max(len(s.encode()) for s in self.sampling.stop) + 1
        tail = decode(self.tokens[-min(reach, len(self.logprobs)) :])
        return any(s in tail for s in self.sampling.stop)
