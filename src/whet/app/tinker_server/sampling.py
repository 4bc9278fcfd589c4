"""Endpoints of sampling clients."""

import asyncio
import hashlib
from collections.abc import Sequence

import numpy as np
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.app.tinker_server import codec
from whet.app.tinker_server.backend import BaseModelInfo, Sampled, Samplers, Weights
from whet.app.tinker_server.futures import FutureResult
from whet.app.tinker_server.schemas import CreateSampler, Sample, Tensor, read_json
from whet.app.tinker_server.state import ServerState
from whet.app.tinker_server.storage import SamplingSession
from whet.config import explain
from whet.engines.scorer import ScoreRequest
from whet.errors import RequestError
from whet.types import Sampling


def build_sampling_routes(state: ServerState) -> list[Route]:
    """Build the routes."""
    endpoints = _Sampling(state)
    return [
        Route("/create_sampling_session", endpoints.create, methods=["POST"]),
        Route("/samplers/{sampler}", endpoints.read_sampler),
        Route("/asample", endpoints.sample, methods=["POST"]),
    ]


class _Sampling:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def create(self, request: Request) -> Response:
        body = await read_json(request, CreateSampler)
        state = self._state
        state.require_session(body.session_id)
        model = state.find_sampled_model(body.base_model, body.model_path)
        sampler = SamplingSession(
            id=f"{body.session_id}:sample:{body.sampling_session_seq_id}",
            session=body.session_id,
            base_model=model.samplers.served.name,
            model_path=body.model_path,
        )
        state.storage.save_sampler(sampler)
        reply = {"sampling_session_id": sampler.id, "type": "create_sampling_session"}
        return JSONResponse(reply)

    async def read_sampler(self, request: Request) -> Response:
        sampler = self._state.storage.read_sampler(request.path_params["sampler"])
        return JSONResponse(
            {
                "sampler_id": sampler.id,
                "base_model": sampler.base_model,
                "model_path": sampler.model_path,
            }
        )

    async def sample(self, request: Request) -> Response:
        body = await read_json(request, Sample)
        sampler = self._state.storage.read_sampler(body.sampling_session_id)
        id = f"{sampler.id}:{body.seq_id}"
        self._state.futures.start(id, lambda: self._sample(body, sampler), cancellable=True)
        ids = [f"{id}:{index}" for index in range(body.num_samples)]
        return JSONResponse({"request_id": id, "sample_sequence_ids": ids})

    async def _sample(self, body: Sample, sampler: SamplingSession) -> FutureResult:
        if body.record_stability_info:
            raise RequestError("record_stability_info is not supported: leave it out")
        samplers = self._state.find_model(sampler.base_model).samplers
        weights = self._state.find_weights(sampler.model_path)
        prompt = _read_tokens(body)
        prompt_reply = await _score(samplers, body, weights, prompt)
        if prompt_reply is not None and _is_scoring(body, prompt, samplers.served):
            nothing = Sampled((), (), (), "length")
            return codec.encode_sample([nothing] * body.num_samples, 0, prompt_reply)
        sampled = await asyncio.gather(
            *(
                samplers.sample(weights, prompt, _read_sampling(body, samplers.served, index))
                for index in range(body.num_samples)
            )
        )
        return codec.encode_sample(sampled, body.topk_sample_logprobs, prompt_reply)


async def _score(
    samplers: Samplers, body: Sample, weights: Weights | None, prompt: Sequence[int]
) -> codec.PromptReply | None:
    targets = _read_targets(body.target_prompt_logprobs, prompt)
    wanted = ScoreRequest(
        top=body.topk_prompt_logprobs,
        targets=None if targets is None else targets.clip(min=0),
        samples=body.prompt_alt_tokens_k,
        temperature=body.sampling_params.temperature,
    )
    if not (body.prompt_logprobs or wanted.top or wanted.samples or targets is not None):
        return None
    vocabulary = samplers.served.vocabulary
    if targets is not None and targets.size and targets.max() >= vocabulary:
        raise RequestError(f"target_prompt_logprobs has ids beyond {vocabulary - 1}")
    last = body.prompt_logprobs_last_n
    if last is not None and last > len(prompt) - 1:
        raise RequestError(f"prompt_logprobs_last_n must be at most {len(prompt) - 1}")
    scores = await samplers.score(weights, prompt, wanted)
    requested = None if targets is None else targets >= 0
    tensor = body.target_prompt_logprobs
    is_sparse = tensor is not None and tensor.sparse_crow_indices is not None
    return codec.PromptReply(scores, bool(body.prompt_logprobs), last, requested, is_sparse)


def _read_sampling(body: Sample, served: BaseModelInfo, index: int) -> Sampling:
    params = body.sampling_params
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop is not None and "" in stop:
        raise RequestError("stop has an empty string, at which every answer would end")
    # Without a word the model ends its own turn; an empty list is no end at all.
    stop_ids = served.eos_ids if stop is None else ()
    try:
        return Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            max_tokens=params.max_tokens,
            stop=tuple(s for s in stop or () if isinstance(s, str)),
            stop_ids=(*stop_ids, *(s for s in stop or () if isinstance(s, int))),
            seed=None if params.seed is None else _mix_seed(params.seed, index),
            top_logprobs=body.topk_sample_logprobs,
        )
    except ValidationError as error:
        raise RequestError(explain(error).replace("config key", "sampling", 1)) from error


def _mix_seed(seed: int, index: int) -> int:
    """Derive the seed of a sample, unlike any of a request with another seed."""
    mixed = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return int.from_bytes(mixed[:8], "big") >> 1


def _read_tokens(body: Sample) -> list[int]:
    if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
        raise RequestError("the prompt has images or audio: only text is supported")
    return [token for chunk in body.prompt.chunks for token in chunk.tokens]


def _is_scoring(body: Sample, prompt: Sequence[int], served: BaseModelInfo) -> bool:
    """Whether the prompt fills the context: the client scores it by a request for one token."""
    return len(prompt) == served.context_length and body.sampling_params.max_tokens == 1


def _read_targets(tensor: Tensor | None, prompt: Sequence[int]) -> codec.Ids | None:
    if tensor is None:
        return None
    if len(tensor.shape) != 2 or tensor.shape[0] != len(prompt) - 1:
        raise RequestError(
            f"target_prompt_logprobs has shape {tensor.shape}; expected [{len(prompt) - 1}, K]"
        )
    if (ends := tensor.sparse_crow_indices) is not None:
        arrays = (ends, tensor.sparse_col_indices or (), tensor.data)
        try:
            ids = [np.array(values, np.int64) for values in arrays]
            return codec.expand_sparse(tensor.shape, *ids, fill=-1)
        except (ValueError, IndexError, OverflowError) as error:
            raise RequestError(f"target_prompt_logprobs is an invalid tensor: {error}") from error
    if len(tensor.data) != tensor.shape[0] * tensor.shape[1]:
        raise RequestError("the data of target_prompt_logprobs does not match its shape")
    return np.array(tensor.data, np.int64).reshape(tensor.shape)
