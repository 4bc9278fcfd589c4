"""Base of engines whose service returns a whole continuation at once."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import ClassVar

from whet.engines.request import SampledTokens, SampleRequest, compute_remaining_context
from whet.errors import EngineError, RequestError
from whet.protocols import Engine
from whet.types import Sampling, TokenChunk


class SingleChunkEngine(Engine):
    """Samples one continuation per request; a stream is a single chunk.

    Stop strings end a generation here, after it was sampled.
    """

    SERVICE: ClassVar[str]
    """What samples, for errors."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context_length: int) -> None:
        """`decode` turns ids into text, to find stop strings."""
        self._decode = decode
        self._closed = False
        self.context_length = context_length

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        room = compute_remaining_context(prompt, self.context_length)
        if sampling.grammar is not None:
            raise RequestError(
                f"{self.SERVICE} does not support grammars: leave out the output format"
            )
        if self._closed:
            raise EngineError("the engine is closed")
        limit = min(sampling.max_tokens or room, room)
        tokens = list(prompt)
        sampled = await self._sample(tokens, sampling, limit, affinity)
        if self._closed:  # meanwhile
            raise EngineError("the engine was closed")
        request = SampleRequest(tokens=tokens, sampling=sampling, limit=limit, stream=False, seed=0)
        for token, version in sampled:
            if (chunk := request.append(token, version, self._decode)) is not None:
                yield chunk
                return
        raise EngineError(f"{self.SERVICE} ended a generation without a stop reason")

    async def close(self) -> None:
        self._closed = True

    @abstractmethod
    async def _sample(
        self, prompt: list[int], sampling: Sampling, limit: int, affinity: str
    ) -> Iterable[tuple[SampledTokens, int]]:
        """Sample a continuation; returns each token with its policy version."""
