"""An engine without a model: scripted answers, then pseudo-random ones. For tests and dry runs."""

import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from random import Random

from anyio.lowlevel import checkpoint

from whet.engines.request import Drawn, Request, room_after
from whet.errors import EngineError, RequestError
from whet.protocols import Engine
from whet.types import Piece, Sampling


def decode_bytes(tokens: Sequence[int]) -> str:
    """Text whose bytes are the ids."""
    return bytes(tokens).decode(errors="replace")


class FakeEngine(Engine):
    """Samples from a distribution that the version and the last token decide.

    Answers of the script are given as they stand, one for each request in the order they come,
    with the log-probabilities they would have at temperature 1. One ends after its last token,
    unless what the request asked for ends it before.
    """

    def __init__(
        self,
        script: Iterable[Sequence[int]] = (),
        *,
        decode: Callable[[Sequence[int]], str] = decode_bytes,
        vocabulary: int = 256,
        context_length: int = 1024,
    ) -> None:
        """`decode` turns ids into text, for stop strings alone."""
        self._script = deque(tuple(answer) for answer in script)
        if not all(self._script):
            raise ValueError("an answer of the script has no tokens")
        self._decode = decode
        self._vocabulary = vocabulary
        self._random = Random()
        self._closed = False
        self.context_length = context_length
        self.version = 0
        """Of the weights it pretends to have; may be set at any time."""
        self.prompts: list[tuple[int, ...]] = []
        """What it was asked, in order."""
        self.active = 0
        """How many requests are being sampled."""

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[Piece]:
        room = room_after(prompt, self.context_length, self._vocabulary)
        if sampling.grammar is not None:
            raise RequestError("this engine cannot hold its samples to a grammar")
        self.prompts.append(tuple(prompt))
        answer = self._script.popleft() if self._script else None
        limit = min(sampling.max_tokens or room, room)
        request = Request(
            tokens=list(prompt),
            sampling=sampling,
            limit=limit if answer is None else min(limit, len(answer)),
            stream=stream,
            seed=sampling.seed or 0,
        )
        dice = self._random if sampling.seed is None else Random(sampling.seed)
        self.active += 1
        try:
            piece = None
            while piece is None or piece.stop is None:
                await checkpoint()
                if self._closed:
                    raise EngineError("the engine is closed")
                drawn = self._draw(request, answer, dice)
                piece = request.take(drawn, self.version, self._decode)
                if piece is not None:
                    by_script = piece.stop == "length" and len(request.logprobs) < limit
                    yield replace(piece, stop="stop") if by_script else piece
        finally:
            self.active -= 1

    async def close(self) -> None:
        self._closed = True

    def _draw(self, request: Request, answer: Sequence[int] | None, dice: Random) -> Drawn:
        sampling = request.sampling
        if answer is not None:
            sampling = Sampling(top_logprobs=sampling.top_logprobs)
        logprobs = self._distribution(request.tokens[-1], sampling)
        if answer is not None:
            token = answer[len(request.logprobs)]
        elif sampling.temperature == 0:
            token = next(iter(logprobs))
        else:
            shares = [math.exp(logprob) for logprob in logprobs.values()]
            [token] = dice.choices(list(logprobs), shares)
        top = tuple(logprobs.items())[: sampling.top_logprobs]
        return Drawn([token], [logprobs[token]], [top] if sampling.top_logprobs else [])

    def _distribution(self, last: int, sampling: Sampling) -> dict[int, float]:
        """Log-probabilities after a token, likeliest first; what is cut off is absent."""
        dice = Random(f"{self.version} {last}")
        logits = {token: dice.gauss(0, 2) for token in range(self._vocabulary)}
        ranked = sorted(logits, key=lambda token: -logits[token])
        kept = ranked[: sampling.top_k or None]
        scaled = {token: logits[token] / (sampling.temperature or 1.0) for token in kept}
        shares = _normalised(scaled)
        mass = 0.0
        for rank, token in enumerate(kept):
            if mass >= sampling.top_p:
                return _normalised({token: scaled[token] for token in kept[:rank]})
            mass += math.exp(shares[token])
        return shares


def _normalised(logits: dict[int, float]) -> dict[int, float]:
    most = max(logits.values())
    total = most + math.log(sum(math.exp(logit - most) for logit in logits.values()))
    return {token: logit - total for token, logit in logits.items()}
