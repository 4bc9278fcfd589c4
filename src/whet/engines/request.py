"""A sampling request in progress: its tokens so far, and its stop conditions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from whet.errors import PromptTooLong, RequestError
from whet.types import Sampling, StopReason, TokenChunk

if TYPE_CHECKING:  # llguidance is needed by the local engine only
    from whet.engines.local.grammar import Matcher

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""

TopLogprobs = tuple[tuple[int, float], ...]
"""The most probable tokens at a position, with their log-probabilities."""


def compute_remaining_context(
    prompt: Sequence[int], context_length: int, vocabulary: int | None = None
) -> int:
    """Check a prompt and return how many tokens fit in the context after it.

    Raises:
        PromptTooLong: none fits, or the prompt is empty.
        RequestError: an id is outside the vocabulary, as far as that is known.
    """
    remaining = context_length - len(prompt)
    if not prompt:
        raise PromptTooLong("the prompt has no tokens")
    if remaining < 1:
        # The first words are those by which LiteLLM and others recognize a full context.
        raise PromptTooLong(
            f"This model's maximum context length is {context_length} tokens; the prompt has "
            f"{len(prompt)} tokens and leaves no room for an answer"
        )
    if vocabulary is None and min(prompt) < 0:
        raise RequestError("the prompt has ids below 0")
    if vocabulary is not None and (min(prompt) < 0 or max(prompt) >= vocabulary):
        raise RequestError(f"the prompt has ids outside 0 to {vocabulary - 1}")
    return remaining


class SampledTokens(NamedTuple):
    """Newly sampled tokens with their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]
    tops: Sequence[TopLogprobs] = ()
    """Top log-probabilities at each token, if requested."""
    stop: StopReason | None = None
    """The server's reason to stop after these tokens, if it stopped."""


@dataclass(slots=True, eq=False)
class SampleRequest:
    """A prompt and its generation so far."""

    tokens: list[int]
    """The prompt and the tokens sampled after it."""
    sampling: Sampling
    limit: int
    """Maximum number of tokens to sample."""
    stream: bool
    seed: int
    """Together with a token's index it decides what is sampled; 64 bits."""
    matcher: "Matcher | None" = None
    """State of its grammar, if it has one."""
    logprobs: list[float] = field(default_factory=list[float])
    """Log-probabilities of the sampled tokens."""
    tops: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    versions: list[int] = field(default_factory=list[int])
    """Policy version of each sampled token."""
    delivered: int = 0
    """Sampled tokens that were already returned in a chunk."""

    @property
    def needs_every_token(self) -> bool:
        """Whether each token must be processed when it is sampled, not just the last."""
        sampling = self.sampling
        return bool(
            self.stream or sampling.stop or sampling.top_logprobs or self.matcher is not None
        )

    def append(self, sampled: SampledTokens, version: int, decode: Decode) -> TokenChunk | None:
        """Add tokens, of which only the last may stop the request; returns the chunk that is due.

        Raises:
            RequestError: the grammar has no continuation.
        """
        if self.matcher is not None:
            for token in sampled.tokens:
                self.matcher.advance(token)
        self.tokens += sampled.tokens
        self.logprobs += sampled.logprobs
        self.tops += sampled.tops
        self.versions += [version] * len(sampled.tokens)
        stop = (self._stop_reason(decode) if sampled.tokens else None) or sampled.stop
        if not stop and not (self.stream and sampled.tokens):
            return None
        begin, self.delivered = self.delivered, len(self.logprobs)
        prompt = len(self.tokens) - len(self.logprobs)
        return TokenChunk(
            tokens=tuple(self.tokens[prompt + begin :]),
            logprobs=tuple(self.logprobs[begin:]),
            versions=tuple(self.versions[begin:]),
            top=tuple(self.tops[begin:]),
            stop=stop,
        )

    def _stop_reason(self, decode: Decode) -> StopReason | None:
        if self.tokens[-1] in self.sampling.stop_ids:
            return "stop"
        if self.matcher is not None and self.matcher.finished:
            return "stop"
        if self.sampling.stop and self._has_stop_string(decode):
            return "stop"
        return "length" if len(self.logprobs) >= self.limit else None

    def _has_stop_string(self, decode: Decode) -> bool:
        # A token holds at least one byte, so a stop string that ends in the newest token
        # began no more than its own length in tokens ago.
        reach = max(len(s.encode()) for s in self.sampling.stop) + 1
        # A window that begins inside a character may decode to U+FFFD: begin up to 3 earlier.
        for start in range(reach, reach + 4):
            text = decode(self.tokens[-min(start, len(self.logprobs)) :])
            if any(s in text for s in self.sampling.stop):
                return True
            if not text.startswith("\ufffd"):
                return False
        return False
