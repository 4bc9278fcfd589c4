"""Engine at a Tinker service."""

from collections.abc import Callable, Iterator, Sequence

from whet.engines.request import SampledTokens
from whet.engines.single_chunk import SingleChunkEngine
from whet.models.tinker import TinkerPolicy, TinkerSample
from whet.types import Sampling


class TinkerEngine(SingleChunkEngine):
    """Samples from a policy of a Tinker service, which batches concurrent requests."""

    SERVICE = "the Tinker service"

    def __init__(self, policy: TinkerPolicy, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__(decode, policy.context_length)
        self._policy = policy

    async def _sample(
        self, prompt: list[int], sampling: Sampling, limit: int, affinity: str
    ) -> Iterator[tuple[SampledTokens, int]]:
        return _split_tokens(await self._policy.sample(prompt, sampling, limit))


def _split_tokens(sample: TinkerSample) -> Iterator[tuple[SampledTokens, int]]:
    """Each token with its log-probabilities and version."""
    for index, (token, logprob) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
        tops = sample.tops[index : index + 1]
        yield SampledTokens([token], [logprob], tops), sample.version
