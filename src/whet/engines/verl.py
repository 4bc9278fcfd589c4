"""Engine on the inference servers of a verl run, through verl's own client: token ids only."""

import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from whet.engines.request import SampledTokens, SampleRequest, remaining_context
from whet.errors import EngineError, RequestError, boundary
from whet.protocols import Engine
from whet.types import Sampling, TokenChunk

COMPLETED = ("completed", "stop", "length", None)
"""Stop reasons of a generation that is whole; others mean that servers took new weights."""


class TokenClient(Protocol):
    """The client that verl gives to agent loops. No type of verl is needed to use it."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:  # Any: verl's TokenOutput
        """Sample a continuation; a request id keeps to one server."""
        ...


class VerlEngine(Engine):
    """Samples one continuation per request. verl does not stream: a stream is a single chunk.

    Stop strings end a generation here, after it was sampled, since verl's servers differ in them.
    """

    def __init__(
        self,
        client: TokenClient,
        decode: Callable[[Sequence[int]], str],
        *,
        context_length: int,
        version: int = 0,
    ) -> None:
        """`decode` turns ids into text, to find stop strings."""
        self._client = client
        self._decode = decode
        self._closed = False
        self.context_length = context_length
        self.version = version
        """Version of tokens whose server does not report one: verl's global step."""

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
            raise RequestError("verl's servers take no grammars: leave the output format out")
        if sampling.top_logprobs:
            raise RequestError("verl's servers return no top log-probabilities: leave them out")
        if self._closed:
            raise EngineError("the engine is closed")
        limit = min(sampling.max_tokens or room, room)
        tokens = list(prompt)
        with boundary(EngineError, "verl's servers failed"):
            output = await self._client.generate(
                affinity or uuid.uuid4().hex,
                prompt_ids=tokens,
                sampling_params=_sampling_params(sampling, limit),
            )
        request = SampleRequest(tokens=tokens, sampling=sampling, limit=limit, stream=False, seed=0)
        yield self._cut(request, output)

    async def close(self) -> None:
        self._closed = True

    def _cut(self, request: SampleRequest, output: Any) -> TokenChunk:
        """Check what verl returned and cut it at the first requested stop."""
        ids: list[int] = list(output.token_ids)
        logprobs: list[float] = list(output.log_probs or ())
        if output.stop_reason not in COMPLETED:
            raise EngineError(f"verl's servers ended a generation: {output.stop_reason}")
        if not ids or len(ids) != len(logprobs):
            raise EngineError(
                f"verl returned {len(ids)} tokens with {len(logprobs)} log-probabilities"
            )
        oldest = self._read_version(output.extra_fields, "min_global_steps")
        newest = self._read_version(output.extra_fields, "max_global_steps")
        for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            # Between the two it is not known when servers took new weights: the bounds are kept.
            version = oldest if place == 0 else newest
            stop = "stop" if place == len(ids) - 1 else None
            drawn = SampledTokens([token], [float(logprob)], stop=stop)
            if (chunk := request.append(drawn, version, self._decode)) is not None:
                return chunk
        raise AssertionError("the last token always stops a request")

    def _read_version(self, fields: dict[str, Any], key: str) -> int:
        found = fields.get(key)
        return int(self.version if found is None else found)


def _sampling_params(sampling: Sampling, limit: int) -> dict[str, Any]:
    """The parameters as vLLM and SGLang both know them."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_tokens": limit,
        "logprobs": True,
        "stop_token_ids": list(sampling.stop_ids),
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return params
