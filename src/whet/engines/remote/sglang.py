"""SGLang's HTTP API: its own `/generate`, with token ids in both directions.

Written from its documentation and source (0.5.18) and tested against a small server with the same
API, not against SGLang itself.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
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
from whet.engines.request import SampledTokens, SampleRequest
from whet.errors import ConfigError, EngineError, RequestError
from whet.io.http_client import HttpClient
from whet.types import Sampling, StopReason

INFO_PATHS = ("/server_info", "/get_server_info")
"""Paths of newer and of older versions."""
UNTRUNCATED = "this SGLang returns log-probabilities before top_p and top_k: sample without them"
UNSCALED = (
    "this SGLang returns log-probabilities before the temperature: sample at temperature 1, or "
    "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
)

MIN_SPREAD = 1e-2
"""Difference of log-probabilities below which rounding hides what a temperature does to it."""

LOADED = ("already loaded", "already exists")
"""How newer and older versions refuse an adapter that they have."""

LogprobEntry = tuple[float, int, str | None]
"""Log-probability, id and text of a token."""


class SGLang(ServerApi):
    """API and abilities of equal SGLang servers, as probed."""

    name = "SGLang"
    path = "/generate"

    def __init__(self, *, context_length: int) -> None:
        self.context_length = context_length
        self.truncated_logprobs = True
        """Whether log-probabilities are those after top-p and top-k."""
        self.scaled_logprobs = True
        """Whether log-probabilities are those after the temperature."""
        self.incremental = False
        """Whether an event of a stream has only the new tokens."""

    def request_body(
        self, request: SampleRequest, weights: WeightsSpec, *, stream: bool
    ) -> JsonMap:
        sampling = request.sampling
        if sampling.grammar is not None:
            raise RequestError("the SGLang engine does not support grammars")
        if (sampling.top_p < 1 or sampling.top_k) and not self.truncated_logprobs:
            raise RequestError(UNTRUNCATED)
        if sampling.temperature not in (0, 1) and not self.scaled_logprobs:
            raise RequestError(UNSCALED)
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_new_tokens": request.limit,
            # In SGLang `ignore_eos` switches `stop_token_ids` off as well.
            "ignore_eos": not sampling.stop_ids,
            "stop_token_ids": list(sampling.stop_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed % 2**63
        adapter = {"lora_path": weights.model} if weights.kind == "lora" else {}
        return adapter | {
            "input_ids": request.tokens,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": sampling.top_logprobs,
            "return_text_in_logprobs": False,
            "stream": stream,
        }

    def parse_reply(self, reply: JsonMap, request: SampleRequest) -> SampledTokens:
        meta: JsonMap = reply["meta_info"]
        entries: list[LogprobEntry] = meta.get("output_token_logprobs") or []
        # By default each event of a stream repeats all tokens so far.
        new = slice(0 if self.incremental else len(request.logprobs), None)
        tops: list[list[LogprobEntry]] = []
        if request.sampling.top_logprobs:
            tops = meta.get("output_top_logprobs") or []
        return SampledTokens(
            [id for _, id, _ in entries[new]],
            [logprob for logprob, _, _ in entries[new]],
            [tuple((id, logprob) for logprob, id, _ in top) for top in tops[new]],
            _stop_reason(meta.get("finish_reason")),
        )

    async def load_weights(self, http: HttpClient, url: str, weights: WeightsSpec) -> str:
        if weights.kind == "base":
            return ""
        identity = f"whet-{secrets.token_hex(4)}"
        if weights.kind == "lora":
            path = "/load_lora_adapter"
            body = {"lora_name": weights.model, "lora_path": str(weights.folder)}
            needs = "--enable-lora and --max-lora-rank (SGLang 0.5 or newer)"
        else:
            path = "/update_weights_from_disk"
            body = {
                "model_path": str(weights.folder),
                "flush_cache": True,
                "weight_version": identity,
            }
            needs = "a version that has it (0.4 or newer)"
        status, reply = await send(http, url + path, body, timeout_s=LOAD_TIMEOUT_S)
        worked = status == 200 and not (isinstance(reply, dict) and reply.get("success") is False)
        text = read_error_text(reply if isinstance(reply, str) else json.dumps(reply))
        # It still has the adapter if only a request to it has failed.
        has_adapter = weights.kind == "lora" and any(words in text for words in LOADED)
        if not worked and not has_adapter:
            raise EngineError(
                f"the SGLang at {url} does not load weights by {path} ({status}, {text}): start it "
                f"with {needs}"
            )
        # An older version knows no weight_version, and a restarted server does not have this one.
        kept = weights.kind == "full" and await self.identify(http, url)
        return identity if kept else ""

    async def identify(self, http: HttpClient, url: str) -> str:
        for path in ("/model_info", "/get_model_info"):
            status, reply = await send(http, url + path)
            if status == 200:
                match reply:
                    case {"weight_version": str(version)}:
                        return version
                    case _:
                        return ""
        return ""

    async def unload_weights(self, http: HttpClient, url: str, model: str) -> None:
        await send(http, f"{url}/unload_lora_adapter", {"lora_name": model})


async def probe_sglang(
    http: HttpClient, urls: Sequence[str], *, context_length: int, progress: Callable[[str], None]
) -> SGLang:
    """Probe the abilities of servers; `context_length` is used where they do not report one.

    Raises:
        ConfigError: one is not SGLang, does not return token ids, or differs from the others.
    """
    probes = [_probe(http, url, context_length) for url in urls]
    found = require_equal(await asyncio.gather(*probes), urls)
    if not found.truncated_logprobs:
        progress(f"note: {UNTRUNCATED}")
    if not found.scaled_logprobs:
        progress(f"note: {UNSCALED}")
    return found


async def _probe(http: HttpClient, url: str, context_length: int) -> SGLang:
    info = await _fetch_info(http, url)
    found = SGLang(context_length=int(info.get("context_length") or context_length))
    found.incremental = bool(info.get("incremental_streaming_output"))
    sampling = Sampling(top_k=1, max_tokens=1)
    request = SampleRequest(tokens=[0, 1], sampling=sampling, limit=1, stream=False, seed=0)
    body = found.request_body(request, WeightsSpec(0), stream=False)
    status, reply = await probe(http, url + found.path, body)
    try:
        [token], [logprob], _, _ = found.parse_reply(reply, request)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the SGLang at {url} does not return sampled ids with log-probabilities "
            f"({status}, {read_error_text(json.dumps(reply))}): use 0.5 or newer"
        ) from error
    found.truncated_logprobs = logprob > -1e-3
    await _check_stop_ids(http, url, found, token)
    plain, halved = [await _measure_spread(http, url, found, temperature) for temperature in (1, 2)]
    found.scaled_logprobs = halved < 0.75 * plain or plain < MIN_SPREAD
    return found


async def _measure_spread(http: HttpClient, url: str, server: SGLang, temperature: float) -> float:
    """Largest less smallest of a few top log-probabilities, which a temperature divides.

    Not by a greedy request: SGLang takes `top_k` 1 for one and ignores the temperature then.
    """
    sampling = Sampling(temperature=temperature, max_tokens=1, top_logprobs=8)
    request = SampleRequest(tokens=[0, 1], sampling=sampling, limit=1, stream=False, seed=0)
    body = server.request_body(request, WeightsSpec(0), stream=False)
    _, reply = await probe(http, url + server.path, body)
    [top] = server.parse_reply(reply, request).tops
    logprobs = [logprob for _, logprob in top]
    return max(logprobs) - min(logprobs)


async def _check_stop_ids(http: HttpClient, url: str, server: SGLang, token: int) -> None:
    """Check that a server stops at a stop id: `token`, which greedy sampling takes first."""
    sampling = Sampling(top_k=1, max_tokens=4, stop_ids=(token,))
    request = SampleRequest(tokens=[0, 1], sampling=sampling, limit=4, stream=False, seed=0)
    body = server.request_body(request, WeightsSpec(0), stream=False)
    _, reply = await probe(http, url + server.path, body)
    if (found := server.parse_reply(reply, request).tokens) != [token]:
        raise ConfigError(
            f"the SGLang at {url} does not stop at stop_token_ids: found {len(found)} tokens, "
            "expected 1; use 0.5 or newer"
        )


async def _fetch_info(http: HttpClient, url: str) -> JsonMap:
    for path in INFO_PATHS:
        status, info = await probe(http, url + path)
        if status == 200 and isinstance(info, dict):
            return cast(JsonMap, info)
    raise ConfigError(f"there is no SGLang at {url}: missing {' and '.join(INFO_PATHS)}")


def _stop_reason(reason: JsonMap | None) -> StopReason | None:
    match reason:
        case None:
            return None
        case {"type": "stop"}:
            return "stop"
        case {"type": "length"}:
            return "length"
        case _:
            raise ReplicaFailed(f"unknown finish_reason {json.dumps(reason)}")
