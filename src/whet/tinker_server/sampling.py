"""Endpoints that sample."""

import asyncio
from collections.abc import Sequence

import numpy as np
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.config import explain
from whet.errors import RequestError
from whet.tinker_server import wire
from whet.tinker_server.context import Context
from whet.tinker_server.promises import Reply
from whet.tinker_server.records import Sampler
from whet.tinker_server.requests import CreateSampler, Sample, Tensor, read
from whet.tinker_server.workshop import Ids, PromptAsked, Weights
from whet.types import Sampling


def sampling_routes(context: Context) -> list[Route]:
    """The routes."""
    endpoints = _Sampling(context)
    return [
        Route("/create_sampling_session", endpoints.create, methods=["POST"]),
        Route("/samplers/{sampler}", endpoints.sampler),
        Route("/asample", endpoints.sample, methods=["POST"]),
    ]


class _Sampling:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        body = await read(request, CreateSampler)
        context, served = self._context, self._context.samplers.served
        context.require_session(body.session_id)
        if body.model_path is not None:
            saved = context.records.checkpoint(body.model_path)
            if saved.kind == "external_weights":
                raise RequestError(f"{body.model_path!r} is for other tools, not for sampling")
        elif body.base_model is None:
            raise RequestError("name a base_model or a model_path to sample from")
        if body.base_model is not None:
            context.refuse_other_models(body.base_model)
        sampler = Sampler(
            id=f"{body.session_id}:sample:{body.sampling_session_seq_id}",
            session=body.session_id,
            base_model=served.name,
            model_path=body.model_path,
        )
        context.records.keep_sampler(sampler)
        reply = {"sampling_session_id": sampler.id, "type": "create_sampling_session"}
        return JSONResponse(reply)

    async def sampler(self, request: Request) -> Response:
        sampler = self._context.records.sampler(request.path_params["sampler"])
        return JSONResponse(
            {
                "sampler_id": sampler.id,
                "base_model": sampler.base_model,
                "model_path": sampler.model_path,
            }
        )

    async def sample(self, request: Request) -> Response:
        body = await read(request, Sample)
        sampler = self._context.records.sampler(body.sampling_session_id)
        id = f"{sampler.id}:{body.seq_id}"
        self._context.promises.make(id, lambda: self._sample(body, sampler), cancellable=True)
        ids = [f"{id}:{index}" for index in range(body.num_samples)]
        return JSONResponse({"request_id": id, "sample_sequence_ids": ids})

    async def _sample(self, body: Sample, sampler: Sampler) -> Reply:
        if body.record_stability_info:
            raise RequestError("this server has no stable_reinforce: leave out its records")
        weights = self._weights(sampler)
        prompt = _tokens(body)
        prompt_reply = await self._score(body, weights, prompt)
        samplers = self._context.samplers
        sampled = await asyncio.gather(
            *(
                samplers.sample(weights, prompt, self._sampling(body, index))
                for index in range(body.num_samples)
            )
        )
        return wire.encode_sample(sampled, body.topk_sample_logprobs, prompt_reply)

    async def _score(
        self, body: Sample, weights: Weights | None, prompt: Sequence[int]
    ) -> wire.PromptReply | None:
        targets = _targets(body.target_prompt_logprobs, prompt)
        asked = PromptAsked(
            top=body.topk_prompt_logprobs,
            targets=None if targets is None else targets.clip(min=0),
            draws=body.prompt_alt_tokens_k,
            temperature=body.sampling_params.temperature,
        )
        if not (body.prompt_logprobs or asked.top or asked.draws or targets is not None):
            return None
        vocabulary = self._context.samplers.served.vocabulary
        if targets is not None and targets.size and targets.max() >= vocabulary:
            raise RequestError(f"target_prompt_logprobs has ids beyond {vocabulary - 1}")
        last = body.prompt_logprobs_last_n
        if last is not None and last > len(prompt) - 1:
            raise RequestError(f"prompt_logprobs_last_n is at most {len(prompt) - 1} here")
        scores = await self._context.samplers.score(weights, prompt, asked)
        wanted = None if targets is None else targets >= 0
        return wire.PromptReply(scores, bool(body.prompt_logprobs), last, wanted)

    def _weights(self, sampler: Sampler) -> Weights | None:
        if sampler.model_path is None:
            return None
        saved = self._context.records.checkpoint(sampler.model_path)
        return Weights(self._context.records.folder(saved.path), saved.lora)

    def _sampling(self, body: Sample, index: int) -> Sampling:
        params = body.sampling_params
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        # Without a word the model ends its own turn; an empty list is no end at all.
        stop_ids = self._context.samplers.served.eos_ids if stop is None else ()
        try:
            return Sampling(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(0, params.top_k),
                max_tokens=params.max_tokens,
                stop=tuple(s for s in stop or () if isinstance(s, str)),
                stop_ids=(*stop_ids, *(s for s in stop or () if isinstance(s, int))),
                # Samples of one request differ, and are the same when it is made again.
                seed=None if params.seed is None else params.seed + index,
                top_logprobs=body.topk_sample_logprobs,
            )
        except ValidationError as error:
            raise RequestError(explain(error).replace("config key", "sampling", 1)) from error


def _tokens(body: Sample) -> list[int]:
    if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
        raise RequestError("the prompt has images or audio; this server takes text alone")
    return [token for chunk in body.prompt.chunks for token in chunk.tokens]


def _targets(tensor: Tensor | None, prompt: Sequence[int]) -> Ids | None:
    if tensor is None:
        return None
    if len(tensor.shape) != 2 or tensor.shape[0] != len(prompt) - 1:
        raise RequestError(
            f"target_prompt_logprobs has shape {tensor.shape}; expected [{len(prompt) - 1}, K]"
        )
    if tensor.sparse_crow_indices is not None:
        raise RequestError("target_prompt_logprobs is sparse; this server takes it dense")
    if len(tensor.data) != tensor.shape[0] * tensor.shape[1]:
        raise RequestError("target_prompt_logprobs has another size than its shape")
    return np.array(tensor.data, np.int64).reshape(tensor.shape)
