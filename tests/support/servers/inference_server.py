"""Small servers with the HTTP APIs of vLLM and SGLang, on the fake engine.

They reproduce documented and observed replies, as far as whet uses them.
"""

import json
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from whet.engines.fake import FakeEngine
from whet.errors import RequestError
from whet.io.server import AppServer
from whet.types import Sampling, TokenChunk, join_chunks

Json = dict[str, Any]
NO_ROUTE = JSONResponse({"detail": "Not Found"}, 404)


@dataclass
class ServerState:
    """Behavior and history of a server."""

    decode: Callable[[Sequence[int]], str]
    vocabulary: int
    context: int
    returns_ids: bool = True
    processed: bool = True
    token_path: bool = False
    loads_adapters: bool = True
    loads_weights: bool = True
    incremental: bool = False
    """SGLang: whether an event of a stream has only the new tokens."""
    ignores_stop_ids: bool = False
    """SGLang: samples on after a stop id, as it does with `ignore_eos`."""
    original_logprobs: bool = False
    """SGLang: log-probabilities before the temperature, SGLANG_RETURN_ORIGINAL_LOGPROB."""
    refused_resets: int = 0
    """vLLM: resets of the prefix cache that fail before one succeeds."""
    instance_id: str = field(default_factory=lambda: secrets.token_hex(4))
    """vLLM: random at each start; empty where a version does not report it."""
    weight_version: str | None = "default"
    """SGLang: given with weights, and lost by a restart; None where a version has none."""
    healthy: bool = True
    breaks_after: int | None = None
    """Events after which the next streams break off; whole answers then fail."""
    pause_s: float = 0.0
    """Between two tokens."""
    load_s: float = 0.0
    """vLLM: time that loading weights takes."""
    engines: dict[str, FakeEngine] = field(default_factory=dict[str, FakeEngine])
    """By the names of models; an adapter's weights are of version 1 and so on."""
    loaded: list[str] = field(default_factory=list[str])
    """Every adapter or weights folder, in the order they came."""
    unloaded: list[str] = field(default_factory=list[str])
    requests: list[Json] = field(default_factory=list[Json])
    sampled: int = 0
    """Tokens, of all requests."""

    def __post_init__(self) -> None:
        self.engines["model"] = self.new_engine(0)

    def new_engine(self, version: int) -> FakeEngine:
        engine = FakeEngine(
            decode=self.decode, vocabulary=self.vocabulary, context_length=self.context
        )
        engine.version = version
        return engine


def serve(app: Callable[[ServerState], Starlette], state: ServerState, port: int = 0) -> AppServer:
    return AppServer(app(state), port=port, name="inference")


# ------------------------------------------------------------------- vLLM


def vllm_app(state: ServerState) -> Starlette:  # noqa: C901 - one function for each path
    async def health(request: Request) -> Response:
        return Response(status_code=200 if state.healthy else 503)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": "0.32.0" if state.returns_ids else "0.9.1"})

    async def models(request: Request) -> Response:
        data = [{"id": name, "max_model_len": state.context} for name in state.engines]
        return JSONResponse({"object": "list", "data": data})

    async def completions(request: Request) -> Response:
        body = await request.json()
        return await _vllm(state, body, body["prompt"], body, request)

    async def tokens(request: Request) -> Response:
        if not state.token_path:
            return JSONResponse({"error": {"message": "scale-out is disabled"}}, 403)
        body = await request.json()
        return await _vllm(state, body, body["token_ids"], body["sampling_params"], request)

    async def load(request: Request) -> Response:
        if not state.loads_adapters:
            return NO_ROUTE
        body = await request.json()
        if (name := body["lora_name"]) in state.engines:
            message = f"The lora adapter '{name}' has already been loaded."
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        state.loaded.append(body["lora_path"])
        await anyio.sleep(state.load_s)
        state.engines[name] = state.new_engine(len(state.loaded))
        return Response("Success")

    async def unload(request: Request) -> Response:
        name = (await request.json())["lora_name"]
        state.unloaded.append(name)
        state.engines.pop(name)
        return Response("Success")

    async def rpc(request: Request) -> Response:
        if not state.loads_weights:
            return NO_ROUTE
        state.loaded.append((await request.json())["kwargs"]["weights_path"])
        await anyio.sleep(state.load_s)
        state.engines["model"] = state.new_engine(len(state.loaded))
        return JSONResponse({"results": [None]})

    async def server_info(request: Request) -> Response:
        device, identity = {"device": "cuda"}, {"instance_id": state.instance_id}
        config = {"device_config": device, "lora_config": None}
        return JSONResponse({"vllm_config": config | (identity if state.instance_id else {})})

    async def reset(request: Request) -> Response:
        state.refused_resets -= 1
        return JSONResponse({"success": state.refused_resets < 0})

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/version", version),
            Route("/server_info", server_info),
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/inference/v1/generate", tokens, methods=["POST"]),
            Route("/v1/load_lora_adapter", load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
            Route("/collective_rpc", rpc, methods=["POST"]),
            Route("/reset_prefix_cache", reset, methods=["POST"]),
        ]
    )


async def _vllm(
    state: ServerState, body: Json, prompt: list[int], how: Json, request: Request
) -> Response:
    state.requests.append(body)
    if body["model"] not in state.engines:
        message = f"The model `{body['model']}` does not exist."
        return JSONResponse({"error": {"message": message, "code": 404}}, 404)
    sampling = _sampling(how, how.get("structured_outputs"))

    def choice(chunk: TokenChunk) -> Json:
        choice: Json = {"index": 0, "finish_reason": chunk.stop}
        if state.returns_ids:
            choice["token_ids"] = list(chunk.tokens)
        logprobs = list(chunk.logprobs)
        if not state.processed:
            logprobs = [logprob - 1 for logprob in logprobs]
        if "token_ids" in body:
            content = [
                {"logprob": lp, "top_logprobs": [{"token_id": i, "logprob": v} for i, v in top]}
                for lp, top in zip(logprobs, chunk.top or [()] * len(logprobs), strict=True)
            ]
            return choice | {"logprobs": {"content": content}}
        tops = [
            {f"token_id:{id}": value for id, value in (*top, (chunk.tokens[at], logprobs[at]))}
            for at, top in enumerate(chunk.top or [()] * len(logprobs))
        ]
        return choice | {"logprobs": {"token_logprobs": logprobs, "top_logprobs": tops}}

    def event(chunks: Sequence[TokenChunk]) -> Json:
        return {"choices": [choice(chunks[-1])]}

    return await _answer(state, body, prompt, sampling, request, event)


# ------------------------------------------------------------------- SGLang


def sglang_app(state: ServerState) -> Starlette:  # noqa: C901 - one function for each path
    async def health(request: Request) -> Response:
        return Response(status_code=200 if state.healthy else 503)

    async def info(request: Request) -> Response:
        version = {"weight_version": state.weight_version} if state.weight_version else {}
        return JSONResponse({"model_path": "model", **version})

    async def server_info(request: Request) -> Response:
        return JSONResponse(
            {"context_length": state.context, "incremental_streaming_output": state.incremental}
        )

    async def generate(request: Request) -> Response:
        body = await request.json()
        state.requests.append(body)
        model = body.get("lora_path") or "model"
        if model not in state.engines:
            message = f"The following requested LoRA adapters are not loaded: {model}"
            return JSONResponse({"error": {"message": message}}, 400)
        sampling = _sglang_sampling(body, state)
        if state.original_logprobs:
            # What is sampled does not matter to the test of it, the log-probabilities do.
            sampling = sampling.model_copy(update={"temperature": 1.0})
        cumulative = body["stream"] and not state.incremental

        def event(chunks: Sequence[TokenChunk]) -> Json:
            shown = chunks if cumulative else chunks[-1:]
            logprobs = [
                [lp, id, None] for p in shown for id, lp in zip(p.tokens, p.logprobs, strict=True)
            ]
            tops = [[[v, id, None] for id, v in top] for p in shown for top in p.top]
            stop = chunks[-1].stop
            meta = {
                "finish_reason": {"type": stop} if stop else None,
                "output_token_logprobs": logprobs,
                "output_top_logprobs": tops,
            }
            ids = [id for chunk in shown for id in chunk.tokens]
            return {"output_ids": ids, "meta_info": meta}

        return await _answer(
            state, {**body, "model": model}, body["input_ids"], sampling, request, event
        )

    async def load(request: Request) -> Response:
        body = await request.json()
        if (name := body["lora_name"]) in state.engines:
            message = f"Failed to load LoRA adapter {name} because it is already loaded"
            return JSONResponse({"success": False, "error_message": message}, 400)
        state.loaded.append(body["lora_path"])
        state.engines[name] = state.new_engine(len(state.loaded))
        return JSONResponse({"success": True})

    async def unload(request: Request) -> Response:
        name = (await request.json())["lora_name"]
        state.unloaded.append(name)
        state.engines.pop(name)
        return JSONResponse({"success": True})

    async def update(request: Request) -> Response:
        body = await request.json()
        state.loaded.append(body["model_path"])
        if state.weight_version is not None:
            state.weight_version = body["weight_version"]
        state.engines["model"] = state.new_engine(len(state.loaded))
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/get_model_info", info),
            Route("/get_server_info", server_info),
            Route("/generate", generate, methods=["POST"]),
            Route("/load_lora_adapter", load, methods=["POST"]),
            Route("/unload_lora_adapter", unload, methods=["POST"]),
            Route("/update_weights_from_disk", update, methods=["POST"]),
        ]
    )


def _sglang_sampling(body: Json, state: ServerState) -> Sampling:
    sampling = _sampling(body["sampling_params"], None)
    sampling = sampling.model_copy(update={"top_logprobs": body["top_logprobs_num"]})
    # SGLang checks `ignore_eos` before `stop_token_ids`.
    if body["sampling_params"]["ignore_eos"] or state.ignores_stop_ids:
        sampling = sampling.model_copy(update={"stop_ids": ()})
    return sampling


# ------------------------------------------------------------------- both


def _sampling(how: Json, structured: Json | None) -> Sampling:
    return Sampling(
        temperature=how["temperature"],
        top_p=how["top_p"],
        top_k=max(0, how["top_k"]),
        max_tokens=how.get("max_tokens", how.get("max_new_tokens")),
        stop_ids=tuple(how["stop_token_ids"] or ()),
        seed=how.get("seed", how.get("sampling_seed")),
        top_logprobs=how.get("logprobs", 0),
        grammar=structured["grammar"] if structured else None,
    )


async def _answer(
    state: ServerState,
    body: Json,
    prompt: list[int],
    sampling: Sampling,
    request: Request,
    event: Callable[[Sequence[TokenChunk]], Json],
) -> Response:
    engine = state.engines[body["model"]]
    stream = bool(body["stream"])
    chunks = engine.generate(prompt, sampling, stream=True)
    try:
        first = await anext(chunks)
    except RequestError as error:
        return JSONResponse({"error": {"message": str(error), "code": 400}}, 400)

    async def sampled() -> AsyncGenerator[list[TokenChunk]]:
        so_far = [first]
        async with aclosing(chunks):
            yield so_far
            while so_far[-1].stop is None:
                await anyio.sleep(state.pause_s)
                so_far.append(await anext(chunks))
                state.sampled += 1
                yield so_far

    async def events() -> AsyncGenerator[bytes]:
        async for so_far in sampled():
            if state.breaks_after is not None and len(so_far) > state.breaks_after:
                raise ConnectionResetError("broken on purpose")
            yield b"data: " + json.dumps(event(so_far)).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    if stream:
        return StreamingResponse(events(), media_type="text/event-stream")
    [*_, so_far] = [so_far async for so_far in sampled()]
    if state.breaks_after is not None:
        return JSONResponse({"error": {"message": "EngineCore died"}}, 500)
    return JSONResponse(event([join_chunks(so_far)]))
