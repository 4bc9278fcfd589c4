"""An engine without a model: scripted answers, then pseudo-random ones. For tests."""

import math
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from random import Random

from anyio.lowlevel import checkpoint

from whet.engines.request import Decode, SampledTokens, SampleRequest, compute_remaining_context
from whet.errors import EngineError, RequestError
from whet.protocols import Engine
from whet.types import Sampling, TokenChunk


def decode_bytes(tokens: Sequence[int]) -> str:
    """Decode token ids that are the bytes of a text."""
    return bytes(tokens).decode(errors="replace")


class FakeEngine(Engine):
    """Samples from a distribution that depends on the version and the last token.

    Each answer of the script is returned for one request, in order of arrival, with the
    log-probabilities it would have at temperature 1. It ends after its last token, or earlier at a
    stop condition of the request.
    """

    def __init__(
        self,
        script: Iterable[Sequence[int]] = (),
        *,
        decode: Decode = decode_bytes,
        vocabulary: int = 256,
        context_length: int = 1024,
    ) -> None:
        """`decode` is used for stop strings only."""
        self._script = deque(tuple(answer) for answer in script)
        if not all(self._script):
            raise ValueError("an answer of the script has no tokens")
        self._decode = decode
        self._vocabulary = vocabulary
        self._random = Random()
        self._closed = False
        self.context_length = context_length
        self.version = 0
        """Version of its pretended weights; may be set at any time."""
        self.prompts: list[tuple[int, ...]] = []
        """All prompts, in order of arrival."""
        self.active = 0
        """Number of requests being sampled."""

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        remaining = compute_remaining_context(prompt, self.context_length, self._vocabulary)
        if sampling.grammar is not None:
            raise RequestError("this engine does not support grammars")
        self.prompts.append(tuple(prompt))
        answer = self._script.popleft() if self._script else None
        limit = min(sampling.max_tokens or remaining, remaining)
        request = SampleRequest(
            tokens=list(prompt),
            sampling=sampling,
            limit=limit if answer is None else min(limit, len(answer)),
            stream=stream,
            seed=sampling.seed or 0,
        )
        random = self._random if sampling.seed is None else Random(sampling.seed)
        self.active += 1
        try:
            chunk = None
            while chunk is None or chunk.stop is None:
                await checkpoint()
                if self._closed:
                    raise EngineError("the engine is closed")
                sampled = self._sample(request, answer, random)
                chunk = request.append(sampled, self.version, self._decode)
                if chunk is not None:
                    by_script = chunk.stop == "length" and len(request.logprobs) < limit
                    yield replace(chunk, stop="stop") if by_script else chunk
        finally:
            self.active -= 1

    async def close(self) -> None:
        self._closed = True

    def _sample(
        self, request: SampleRequest, answer: Sequence[int] | None, random: Random
    ) -> SampledTokens:
        sampling = request.sampling
        if answer is not None:
            sampling = Sampling(top_logprobs=sampling.top_logprobs)
        logprobs = self._compute_distribution(request.tokens[-1], sampling)
        if answer is not None:
            token = answer[len(request.logprobs)]
        elif sampling.temperature == 0:
            token = next(iter(logprobs))
        else:
            probabilities = [math.exp(logprob) for logprob in logprobs.values()]
            [token] = random.choices(list(logprobs), probabilities)
        top = tuple(logprobs.items())[: sampling.top_logprobs]
        return SampledTokens([token], [logprobs[token]], [top] if sampling.top_logprobs else [])

    def _compute_distribution(self, last: int, sampling: Sampling) -> dict[int, float]:
        """Log-probabilities after a token, most probable first, without truncated tokens."""
        random = Random(f"{self.version} {last}")
        logits = {token: random.gauss(0, 2) for token in range(self._vocabulary)}
        ranked = sorted(logits, key=lambda token: -logits[token])
        kept = ranked[: sampling.top_k or None]
        scaled = {token: logits[token] / (sampling.temperature or 1.0) for token in kept}
        logprobs = _log_softmax(scaled)
        mass = 0.0
        for rank, token in enumerate(kept):
            if mass >= sampling.top_p:
                return _log_softmax({token: scaled[token] for token in kept[:rank]})
            mass += math.exp(logprobs[token])
        return logprobs


def _log_softmax(logits: dict[int, float]) -> dict[int, float]:
    most = max(logits.values())
    total = most + math.log(sum(math.exp(logit - most) for logit in logits.values()))
    return {token: logit - total for token, logit in logits.items()}
