"""An engine that records its samples, and the check that training sees exactly those."""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from anyio.lowlevel import checkpoint

from whet.errors import EngineError
from whet.protocols import Engine
from whet.training.rows import Rows, build_rows
from whet.types import Credit, Sampling, StopReason, TokenChunk, Trajectory


@dataclass(frozen=True)
class Answer:
    """The next tokens to sample."""

    tokens: tuple[int, ...]
    stop: StopReason = "stop"
    piece: int = 1
    """Tokens that leave at once, if the call streams."""
    whole: bool = False
    """Whether it ignores the request's limit of tokens."""


@dataclass(frozen=True)
class Sample:
    """A continuation as the engine knows it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling: Sampling


class RecordingEngine(Engine):
    """Engine with chosen answers; no two of its tokens have the same log-probability."""

    def __init__(self, answer: Callable[[], Answer | EngineError]) -> None:
        self.answer = answer
        self.samples: list[Sample] = []
        """Those that were sampled to their end."""
        self._tokens = 0

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        answer = self.answer()
        if isinstance(answer, EngineError):
            raise answer
        tokens = answer.tokens[: None if answer.whole else sampling.max_tokens]
        cut = len(tokens) < len(answer.tokens)
        ends = [at for at, token in enumerate(tokens) if token in sampling.stop_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        logprobs = tuple(-(self._tokens + at + 1) / 2**20 for at in range(len(tokens)))
        self._tokens += len(tokens)
        size = answer.piece if stream else len(tokens)
        for start in range(0, len(tokens), size):
            await checkpoint()
            part = tokens[start : start + size]
            last = start + size >= len(tokens)
            if last:
                self.samples.append(Sample(tuple(prompt), tokens, logprobs, sampling))
            reason = "length" if cut and not ends else answer.stop
            yield TokenChunk(
                part,
                logprobs[start : start + size],
                (0,) * len(part),
                stop=reason if last else None,
            )

    async def close(self) -> None:
        pass


def prove(trajectory: Trajectory, samples: Sequence[Sample]) -> Rows:
    """Check that every sample trains exactly once, in the context it was sampled in."""
    calls = trajectory.calls
    ids = [call.generation_id(i) for call in calls for i in range(len(call.generations))]
    built = build_rows([Credit(trajectory, dict.fromkeys(ids, 1.0))])
    assert built.unproven == ()
    constrained = [s for s in samples if s.sampling.grammar is not None]
    assert len(built.constrained) == len(constrained)
    by_logprobs = {sample.logprobs: sample for sample in samples}
    assert len(by_logprobs) == len(samples)
    trained = Counter[tuple[float, ...]]()
    for row in built.rows:
        end = 0
        for segment in row.segments:
            sample = by_logprobs[segment.logprobs]
            assert segment.start >= end
            end = segment.end
            assert row.tokens[: segment.start] == sample.prompt
            assert row.tokens[segment.start : segment.end] == sample.tokens
            trained[segment.logprobs] += 1
        assert end == len(row.tokens)
    assert trained == Counter(s.logprobs for s in samples if s.sampling.grammar is None)
    return built
