"""SGLang's wire: its own `/generate`, which takes and tells token ids.

Written from its documentation and source (0.5.18) and tested against a small server that speaks
the same: no SGLang was at hand.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from whet.engines.replicas import ServedWeights
from whet.engines.request import Drawn, Request
from whet.engines.served import Http, Json, ReplicaFailed, Server, error_text
from whet.errors import ConfigError, EngineError, RequestError
from whet.types import Sampling, StopReason

LOAD_S = 600.0
PROBE_S = 300.0
INFO_PATHS = ("/server_info", "/get_server_info")
"""Newer versions, and older ones."""
CUT = "this SGLang tells log-probabilities as they are before top_p and top_k: sample without them"

Entry = tuple[float, int, str | None]
"""Log-probability, id and text of a token."""


class SGLang(Server):
    """What one or several equal SGLang servers can do, as they showed when they were asked."""

    name = "SGLang"
    path = "/generate"

    def __init__(self, *, context_length: int) -> None:
        self.context_length = context_length
        self.tells_cut = True
        """Whether log-probabilities are told after top-p and top-k."""
        self.incremental = False
        """Whether an event of a stream has the new tokens alone."""

    def body(self, request: Request, weights: ServedWeights, *, stream: bool) -> Json:
        sampling = request.sampling
        if sampling.grammar is not None:
            raise RequestError("the SGLang engine cannot hold its samples to a grammar")
        if (sampling.top_p < 1 or sampling.top_k) and not self.tells_cut:
            raise RequestError(CUT)
        how: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_new_tokens": request.limit,
            "ignore_eos": True,
            "stop_token_ids": list(sampling.stop_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.seed is not None:
            how["sampling_seed"] = sampling.seed % 2**63
        adapter = {"lora_path": weights.model} if weights.kind == "lora" else {}
        return adapter | {
            "input_ids": request.tokens,
            "sampling_params": how,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": sampling.top_logprobs,
            "return_text_in_logprobs": False,
            "stream": stream,
        }

    def read(self, said: Json, request: Request) -> Drawn:
        meta: Json = said["meta_info"]
        told: list[Entry] = meta.get("output_token_logprobs") or []
        # A stream tells all tokens so far again and again, unless it was asked not to.
        new = slice(0 if self.incremental else len(request.logprobs), None)
        tops: list[list[Entry]] = []
        if request.sampling.top_logprobs:
            tops = meta.get("output_top_logprobs") or []
        return Drawn(
            [id for _, id, _ in told[new]],
            [logprob for logprob, _, _ in told[new]],
            [tuple((id, logprob) for logprob, id, _ in top) for top in tops[new]],
            _end(meta.get("finish_reason")),
        )

    async def check(self, http: Http, url: str) -> None:
        status, said = await http.ask(f"{url}/health")
        if status != 200:
            raise ReplicaFailed(f"/health answers {status}: {error_text(str(said))}")

    async def put(self, http: Http, url: str, weights: ServedWeights) -> None:
        if weights.kind == "base":
            return
        if weights.kind == "lora":
            path = "/load_lora_adapter"
            body = {"lora_name": weights.model, "lora_path": str(weights.folder)}
            needs = "--enable-lora and --max-lora-rank (SGLang 0.5 or newer)"
        else:
            path = "/update_weights_from_disk"
            body = {"model_path": str(weights.folder), "flush_cache": True}
            needs = "a version that has it (0.4 or newer)"
        status, said = await http.ask(url + path, body, timeout_s=LOAD_S)
        worked = status == 200 and not (isinstance(said, dict) and said.get("success") is False)  # pyright: ignore[reportUnknownMemberType]  # JSON
        if not worked:
            text = error_text(said if isinstance(said, str) else json.dumps(said))
            raise EngineError(
                f"the SGLang at {url} does not take weights by {path} ({status}, {text}): start it "
                f"with {needs}"
            )

    async def drop(self, http: Http, url: str, model: str) -> None:
        await http.ask(f"{url}/unload_lora_adapter", {"lora_name": model})


async def find_sglang(
    http: Http, urls: Sequence[str], *, context_length: int, say: Callable[[str], None]
) -> SGLang:
    """What the servers at these addresses can do; the model's context where they do not tell one.

    Raises:
        ConfigError: one is no SGLang, cannot tell token ids, or differs from the others.
    """
    found = await asyncio.gather(*(_probe(http, url, context_length) for url in urls))
    for url, other in zip(urls, found, strict=True):
        if vars(other) != vars(found[0]):
            raise ConfigError(
                f"the SGLang servers at {urls[0]} and {url} differ: start them with the same model "
                "and flags"
            )
    if not found[0].tells_cut:
        say(f"note: {CUT}")
    return found[0]


async def _probe(http: Http, url: str, context_length: int) -> SGLang:
    told = await _info(http, url)
    found = SGLang(context_length=int(told.get("context_length") or context_length))
    found.incremental = bool(told.get("incremental_streaming_output"))
    sampling = Sampling(top_k=1, max_tokens=1)
    request = Request(tokens=[0, 1], sampling=sampling, limit=1, stream=False, seed=0)
    body = found.body(request, ServedWeights(0), stream=False)
    status, said = await _ask(http, url + found.path, body)
    try:
        [_], [logprob], _, _ = found.read(said, request)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the SGLang at {url} does not tell sampled ids with log-probabilities "
            f"({status}, {error_text(json.dumps(said))}): use 0.5 or newer"
        ) from error
    found.tells_cut = logprob > -1e-3
    return found


async def _info(http: Http, url: str) -> Json:
    for path in INFO_PATHS:
        status, info = await _ask(http, url + path)
        if status == 200 and isinstance(info, dict):
            return cast(Json, info)
    raise ConfigError(f"there is no SGLang at {url}: it has none of {', '.join(INFO_PATHS)}")


async def _ask(http: Http, url: str, body: Json | None = None) -> tuple[int, Any]:
    try:
        return await http.ask(url, body, timeout_s=PROBE_S)
    except ReplicaFailed as error:
        raise ConfigError(f"the SGLang at {url} does not answer: {error}") from error


def _end(reason: Json | None) -> StopReason | None:
    match reason:
        case None:
            return None
        case {"type": "stop"}:
            return "stop"
        case {"type": "length"}:
            return "length"
        case _:
            raise ReplicaFailed(f"its answer ended by {json.dumps(reason)}")
