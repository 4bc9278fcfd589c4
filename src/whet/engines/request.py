"""One continuation being sampled: what it holds so far, and when it ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from whet.types import Piece, Sampling, StopReason

if TYPE_CHECKING:  # an engine without a model needs none of what grammars need
    from whet.engines.grammar import Matcher


class Drawn(NamedTuple):
    """One token with its log-probability, and the likeliest others if asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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
    drawn: list[Drawn] = field(default_factory=list[Drawn])
    versions: list[int] = field(default_factory=list[int])
    delivered: int = 0

    @property
    def watched(self) -> bool:
        """Whether every token is to be looked at when it comes, not just the last."""
        asked = self.sampling
        return bool(self.stream or asked.stop or asked.top_logprobs or self.matcher is not None)

    def take(
        self, drawn: Sequence[Drawn], version: int, decode: Callable[[Sequence[int]], str]
    ) -> Piece | None:
        """Add tokens, of which only the last may be the end; returns the piece that is due.

        Raises:
            RequestError: the grammar leaves no way on from here.
        """
        if self.matcher is not None:
            for one in drawn:
                self.matcher.advance(one.token)
        self.tokens += [one.token for one in drawn]
        self.drawn += drawn
        self.versions += [version] * len(drawn)
        stop = self._stop_reason(decode) if drawn else None
        if not stop and not (self.stream and drawn):
            return None
        begin, self.delivered = self.delivered, len(self.drawn)
        fresh = self.drawn[begin:]
        return Piece(
            tokens=tuple(d.token for d in fresh),
            logprobs=tuple(d.logprob for d in fresh),
            versions=tuple(self.versions[begin:]),
            top=tuple(d.top for d in fresh) if self.sampling.top_logprobs else (),
            stop=stop,
        )

    def _stop_reason(self, decode: Callable[[Sequence[int]], str]) -> StopReason | None:
        if self.drawn[-1].token in self.sampling.stop_ids:
            return "stop"
        if self.matcher is not None and self.matcher.finished:
            return "stop"
        if self.sampling.stop and self._stop_string(decode):
            return "stop"
        return "length" if len(self.drawn) >= self.limit else None

    def _stop_string(self, decode: Callable[[Sequence[int]], str]) -> bool:
        # A token holds at least one byte, so a stop string that ends in the newest token
        # began no more than its own length in tokens ago.
        reach = max(len(s.encode()) for s in self.sampling.stop) + 1
        tail = decode([d.token for d in self.drawn[-reach:]])
        return any(s in tail for s in self.sampling.stop)
