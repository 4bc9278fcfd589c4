"""Samples at a Tinker service."""

from collections.abc import AsyncGenerator, Callable, Sequence

from whet.engines.request import Drawn, Request, room_after
from whet.errors import EngineError, RequestError
from whet.policies.tinker import Sampled, TinkerPolicy
from whet.protocols import Engine
from whet.types import Piece, Sampling


class TinkerEngine(Engine):
    """Asks for one continuation at a time; the service samples those of many requests together.

    It gives no tokens before the last: a stream comes at once, in one piece.
    """

    def __init__(self, policy: TinkerPolicy, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` turns ids into text, for stop strings alone."""
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
    ) -> AsyncGenerator[Piece]:
        room = room_after(prompt, self.context_length)
        if sampling.grammar is not None:
            raise RequestError("this engine cannot hold its samples to a grammar")
        if self._closed:
            raise EngineError("the engine is closed")
        limit = min(sampling.max_tokens or room, room)
        tokens = list(prompt)
        sampled = await self._policy.sample(tokens, sampling, limit)
        if self._closed:
            raise EngineError("the engine was closed")
        request = Request(tokens=tokens, sampling=sampling, limit=limit, stream=False, seed=0)
        yield _until_end(request, sampled, self._decode)

    async def close(self) -> None:
        self._closed = True


def _until_end(request: Request, sampled: Sampled, decode: Callable[[Sequence[int]], str]) -> Piece:
    """What was sampled, up to the first end that was asked for."""
    for place, (token, logprob) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
        drawn = Drawn([token], [logprob], sampled.tops[place : place + 1])
        if (piece := request.take(drawn, sampled.version, decode)) is not None:
            return piece
    raise EngineError("the Tinker service ended an answer where nothing asked it to")
