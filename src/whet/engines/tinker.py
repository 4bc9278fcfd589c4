"""Engine at a Tinker service."""

from collections.abc import AsyncGenerator, Callable, Sequence

from whet.engines.request import SampledTokens, SampleRequest, remaining_context
from whet.errors import EngineError, RequestError
from whet.models.tinker import TinkerPolicy, TinkerSample
from whet.protocols import Engine
from whet.types import Sampling, TokenChunk


class TinkerEngine(Engine):
    """Samples one continuation per request; the service batches concurrent requests.

    The service does not stream: a stream is a single chunk.
    """

    def __init__(self, policy: TinkerPolicy, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` turns ids into text, to find stop strings."""
        self._policy = policy
        self._decode = decode
        self._closed = False
        self.context_length = policy.context_length

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        room = remaining_context(prompt, self.context_length)
        if sampling.grammar is not None:
            raise RequestError("the Tinker engine does not support grammars")
        if self._closed:
            raise EngineError("the engine is closed")
        limit = min(sampling.max_tokens or room, room)
        tokens = list(prompt)
        sampled = await self._policy.sample(tokens, sampling, limit)
        if self._closed:
            raise EngineError("the engine was closed")
        request = SampleRequest(tokens=tokens, sampling=sampling, limit=limit, stream=False, seed=0)
        yield _until_end(request, sampled, self._decode)

    async def close(self) -> None:
        self._closed = True


def _until_end(
    request: SampleRequest, sampled: TinkerSample, decode: Callable[[Sequence[int]], str]
) -> TokenChunk:
    """Cut the sampled tokens at the first requested stop."""
    for place, (token, logprob) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
        drawn = SampledTokens([token], [logprob], sampled.tops[place : place + 1])
        if (chunk := request.append(drawn, sampled.version, decode)) is not None:
            return chunk
    raise EngineError("the Tinker service ended a generation without a stop reason")
