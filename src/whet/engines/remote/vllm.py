"""vLLM's HTTP API: sampling by token ids, loading weights, and probing a version's abilities."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from whet.engines.remote.engine import (
    LOAD_TIMEOUT_S,
    JsonMap,
    ReplicaFailed,
    ServerApi,
    probe,
    read_error_text,
    require_equal,
    send,
)
from whet.engines.remote.replicas import WeightsSpec
from whet.engines.request import SampledTokens, SampleRequest, TopLogprobs
from whet.errors import ConfigError, EngineError, RequestError
from whet.io.http_client import HttpClient
from whet.types import Sampling, StopReason

MIN_VERSION = "0.10.2"
"""The first version whose completions have token ids."""
TOKENS_PATH, COMPLETIONS_PATH = "/inference/v1/generate", "/v1/completions"
INFO_PATH = "/server_info?config_format=json"
"""Config of a server in development mode; its `instance_id` is random at each start."""
TRUNCATED_LOGPROB = -9000.0
"""vLLM writes -9999 for the log-probability of tokens that top-k and top-p exclude."""
RESET_TRIES, RESET_INTERVAL_S = 20, 0.5
"""Tries to reset the prefix cache after loading full weights."""
RAW_LOGPROBS = (
    "this vLLM returns log-probabilities before temperature, top_p and top_k: start it "
    "with --logprobs-mode processed_logprobs, or sample at temperature 1 (or 0) without top_p and "
    "top_k"
)


class VLLM(ServerApi):
    """API and abilities of equal vLLM servers, as probed."""

    name = "vLLM"

    def __init__(self, *, model: str, context_length: int) -> None:
        self.model = model
        """The server's name of the model it was started with."""
        self.context_length = context_length
        self.path = COMPLETIONS_PATH
        self.processed = True
        """Whether log-probabilities are those of the distribution that was sampled."""
        self.grammars = True
        """Whether it supports llguidance grammars."""
        self.device = ""
        self.max_loras: int | None = None
        """Its `--max-loras`, reported in development mode only."""

    def request_body(
        self, request: SampleRequest, weights: WeightsSpec, *, stream: bool
    ) -> JsonMap:
        sampling = request.sampling
        self._check_sampling(sampling)
        params: dict[str, Any] = {
            # All explicit: a model's generation_config.json may have other defaults.
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": request.limit,
            "logprobs": sampling.top_logprobs,
            # The gateway decides what ends a turn.
            "ignore_eos": True,
            "stop_token_ids": list(sampling.stop_ids),
            "skip_special_tokens": False,
        }
        if sampling.seed is not None:
            params["seed"] = sampling.seed % 2**63
        if sampling.grammar is not None:
            params["structured_outputs"] = {"grammar": sampling.grammar}
        model = weights.model or self.model
        if self.path == TOKENS_PATH:
            return {
                "model": model,
                "token_ids": request.tokens,
                "sampling_params": params | {"detokenize": False},
                "stream": stream,
            }
        return params | {
            "model": model,
            "prompt": request.tokens,
            "stream": stream,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }

    def parse_reply(self, reply: JsonMap, request: SampleRequest) -> SampledTokens:
        [choice] = reply["choices"]
        tokens: list[int] = choice.get("token_ids") or []
        scores: JsonMap = choice.get("logprobs") or {}
        logprobs: list[float] = scores.get("token_logprobs") or []
        if "content" in scores:
            logprobs = [token["logprob"] for token in scores["content"]]
        wanted = request.sampling.top_logprobs
        tops = [top[:wanted] for top in _parse_top_logprobs(scores)] if wanted else []
        if len(tokens) != len(logprobs):
            raise ReplicaFailed(
                f"its reply has {len(tokens)} tokens, but {len(logprobs)} log-probabilities"
            )
        return SampledTokens(tokens, logprobs, tops, _stop_reason(choice.get("finish_reason")))

    async def load_weights(self, http: HttpClient, url: str, weights: WeightsSpec) -> str:
        match weights.kind:
            case "base":
                return ""
            case "lora":
                await self._load_adapter(http, url, weights)
                return ""  # a restarted server does not have the adapter's name
            case "full":
                identity = await self.identify(http, url)  # before: a restart is noticed later
                await self._reload(http, url, weights)
                return identity

    async def identify(self, http: HttpClient, url: str) -> str:
        _, reply = await send(http, url + INFO_PATH)
        match reply:
            case {"vllm_config": {"instance_id": str(identity)}}:
                return identity
            case _:
                return ""

    async def unload_weights(self, http: HttpClient, url: str, model: str) -> None:
        await send(http, f"{url}/v1/unload_lora_adapter", {"lora_name": model})

    async def _load_adapter(self, http: HttpClient, url: str, weights: WeightsSpec) -> None:
        if self.max_loras is not None and self.max_loras < weights.max_versions:
            raise EngineError(
                f"the vLLM at {url} has --max-loras {self.max_loras}, but {weights.max_versions} "
                f"versions may be sampled from at once: start it with --max-loras "
                f"{weights.max_versions}"
            )
        adapter = {"lora_name": weights.model, "lora_path": str(weights.folder)}
        status, reply = await send(
            http, f"{url}/v1/load_lora_adapter", adapter, timeout_s=LOAD_TIMEOUT_S
        )
        text = read_error_text(reply if isinstance(reply, str) else json.dumps(reply))
        if status == 404 and "Not Found" in text:
            raise EngineError(
                f"the vLLM at {url} does not load adapters: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment (vLLM 0.10.2 or newer)"
            )
        if status != 200 and "already been loaded" not in text:
            raise EngineError(f"the vLLM at {url} cannot load the adapter: {status}, {text}")

    async def _reload(self, http: HttpClient, url: str, weights: WeightsSpec) -> None:
        if self.device == "cpu" and _is_tied(weights.folder):
            # It packs the output layer once, and not again when the tied embedding changes.
            raise EngineError(
                f"the vLLM at {url} runs on a CPU, where it keeps the old output layer of a model "
                "whose embeddings are tied: set trainer.weights to 'lora'"
            )
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
        status, reply = await send(http, f"{url}/collective_rpc", body, timeout_s=LOAD_TIMEOUT_S)
        if status == 404:
            raise EngineError(
                f"the vLLM at {url} does not reload weights: start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment, or set trainer.weights to 'lora'"
            )
        if status != 200:
            text = read_error_text(reply if isinstance(reply, str) else json.dumps(reply))
            raise EngineError(
                f"the vLLM at {url} cannot load weights while it runs ({status}, {text}): "
                "use vLLM 0.17 or newer, or set trainer.weights to 'lora'"
            )
        await _reset_prefix_cache(http, url)

    def _check_sampling(self, sampling: Sampling) -> None:
        shaped = sampling.temperature not in (0, 1) or sampling.top_p < 1 or sampling.top_k
        if shaped and not self.processed:
            raise RequestError(RAW_LOGPROBS)
        if sampling.grammar is not None and not self.grammars:
            raise RequestError(
                "this vLLM does not support llguidance grammars: start it with "
                """--structured-outputs-config '{"backend": "guidance"}'"""
            )


async def probe_vllm(
    http: HttpClient, urls: Sequence[str], *, progress: Callable[[str], None]
) -> VLLM:
    """Probe the abilities of servers, which must be equal.

    Raises:
        ConfigError: one is not vLLM, is too old, or differs from the others.
    """
    found = require_equal(await asyncio.gather(*(_probe(http, url) for url in urls)), urls)
    if not found.processed:
        progress(f"note: {RAW_LOGPROBS}")
    return found


async def _probe(http: HttpClient, url: str) -> VLLM:
    version = await _fetch_version(http, url)
    model, context_length = await _fetch_model(http, url)
    found = VLLM(model=model, context_length=context_length)
    # With top_k 1 the token has probability 1, unless log-probabilities are those before top_k.
    sampling = Sampling(top_k=1, max_tokens=1)
    request = SampleRequest(tokens=[0, 1], sampling=sampling, limit=1, stream=False, seed=0)
    for path in (TOKENS_PATH, COMPLETIONS_PATH):
        found.path = path
        body = found.request_body(request, WeightsSpec(0), stream=False)
        status, reply = await probe(http, url + path, body)
        if status == 200:
            break
    else:
        raise ConfigError(
            f"vLLM {version} at {url} does not sample from token ids ({status}, "
            f"{read_error_text(json.dumps(reply))}): use {MIN_VERSION} or newer"
        )
    try:
        sampled = found.parse_reply(reply, request)
    except (ReplicaFailed, LookupError, TypeError, ValueError):
        sampled = None
    if sampled is None or not sampled.tokens:
        raise ConfigError(
            f"vLLM {version} at {url} does not return the token ids it samples (return_token_ids "
            f"is missing): use {MIN_VERSION} or newer"
        )
    found.device, found.max_loras = await _fetch_info(http, url)
    found.processed = sampled.logprobs[0] > -1e-3
    found.grammars = await _probe_grammars(http, url, found)
    return found


async def _probe_grammars(http: HttpClient, url: str, found: VLLM) -> bool:
    """Whether llguidance's Lark dialect is supported, tested by a JSON schema inside a rule."""
    sampling = Sampling(grammar='start: %json {"type": "boolean"}', max_tokens=1)
    request = SampleRequest(tokens=[0, 1], sampling=sampling, limit=1, stream=False, seed=0)
    body = found.request_body(request, WeightsSpec(0), stream=False)
    status, _ = await probe(http, url + found.path, body)
    return status == 200


async def _fetch_info(http: HttpClient, url: str) -> tuple[str, int | None]:
    """Device and `--max-loras`, where a server reports them."""
    _, reply = await probe(http, f"{url}{INFO_PATH}")
    match reply:
        case {"vllm_config": {"device_config": {"device": str(device)}, "lora_config": lora}}:
            return device, lora["max_loras"] if lora else None
        case _:
            return "", None


def _is_tied(folder: Path | None) -> bool:
    if folder is None:
        return False
    config = json.loads((folder / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", True))


async def _fetch_version(http: HttpClient, url: str) -> str:
    status, reply = await probe(http, f"{url}/version")
    if status != 200 or not isinstance(reply, dict) or "version" not in reply:
        raise ConfigError(f"there is no vLLM at {url}: /version answers {status}")
    return str(cast(dict[str, Any], reply)["version"])


async def _fetch_model(http: HttpClient, url: str) -> tuple[str, int]:
    status, reply = await probe(http, f"{url}/v1/models")
    match reply:
        case {"data": [{"id": str(model), "max_model_len": int(length)}, *_]}:
            return model, length
        case _:
            raise ConfigError(
                f"the vLLM at {url} does not name its model: /v1/models answers {status}"
            )


def _parse_top_logprobs(scores: JsonMap) -> list[TopLogprobs]:
    """The most probable tokens at each position, from either form of log-probabilities."""
    named: list[dict[str, float]] = scores.get("top_logprobs") or []
    if "content" in scores:
        named = [
            {str(other["token_id"]): other["logprob"] for other in token["top_logprobs"]}
            for token in scores["content"]
        ]
    return [
        tuple(
            (int(name.removeprefix("token_id:")), value)
            for name, value in sorted(top.items(), key=lambda pair: -pair[1])
            if value > TRUNCATED_LOGPROB
        )
        for top in named
    ]


def _stop_reason(reason: str | None) -> StopReason | None:
    if reason in (None, "stop", "length"):
        return reason
    raise ReplicaFailed(f"unknown finish_reason {reason!r}")


async def _reset_prefix_cache(http: HttpClient, url: str) -> None:
    """Discard the KV cache of the previous weights.

    vLLM answers 200 with `success: false` while a request still holds blocks, such as one whose
    client has just disconnected.

    Raises:
        EngineError: the cache cannot be reset, so samples would mix two versions.
    """
    answer = ""
    for _ in range(RESET_TRIES):
        status, reply = await send(http, f"{url}/reset_prefix_cache", {})
        answer = f"{status}, {read_error_text(json.dumps(reply))}"
        if status == 200 and not (reply and cast(JsonMap, reply).get("success") is False):
            return
        await asyncio.sleep(RESET_INTERVAL_S)
    raise EngineError(
        f"the vLLM at {url} does not reset its prefix cache ({answer}): end other requests to it, "
        "or restart it"
    )
