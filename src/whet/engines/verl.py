"""Engine on the inference servers of a verl run, through verl's own client: token ids only."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from whet.engines.request import SampledTokens
from whet.engines.single_chunk import SingleChunkEngine
from whet.errors import EngineError, RequestError, boundary
from whet.types import Sampling

COMPLETED = ("completed", "stop", "length", None)
"""Stop reasons of a generation that is whole; others mean that servers took new weights."""


class TokenClient(Protocol):
    """The client that verl gives to agent loops. No type of verl is needed to use it."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:  # Any: verl's TokenOutput
        """Sample a continuation; a request id keeps to one server."""
        ...


class VerlEngine(SingleChunkEngine):
    """Samples from the servers of a verl run, whose stop strings differ and are not used."""

    SERVICE = "verl"

    def __init__(
        self,
        client: TokenClient,
        decode: Callable[[Sequence[int]], str],
        *,
        context_length: int,
        version: int = 0,
    ) -> None:
        super().__init__(decode, context_length)
        self._client = client
        self.version = version
        """Version of tokens whose server does not report one: verl's global step."""

    async def _sample(
        self, prompt: list[int], sampling: Sampling, limit: int, affinity: str
    ) -> Iterator[tuple[SampledTokens, int]]:
        if sampling.top_logprobs:
            raise RequestError("verl's servers return no top log-probabilities: leave them out")
        with boundary(EngineError, "verl's servers failed"):
            output = await self._client.generate(
                affinity or uuid.uuid4().hex,
                prompt_ids=prompt,
                sampling_params=_build_params(sampling, limit),
            )
        return self._split_tokens(output)

    def _split_tokens(self, output: Any) -> Iterator[tuple[SampledTokens, int]]:
        """Check what verl returned; yields each token with its log-probability and version."""
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
        for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            # Between the two it is not known when servers took new weights: the bounds are kept.
            version = oldest if index == 0 else newest
            stop = "stop" if index == len(ids) - 1 else None
            yield SampledTokens([token], [float(logprob)], stop=stop), version

    def _read_version(self, fields: dict[str, Any], key: str) -> int:
        found = fields.get(key)
        return int(self.version if found is None else found)


def _build_params(sampling: Sampling, limit: int) -> dict[str, Any]:
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
