"""vLLM's wire: sampling by token ids, weights while it runs, and what a version lacks."""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from whet.engines.replicas import ServedWeights
from whet.engines.request import Drawn, Request, Top
from whet.engines.served import Http, Json, ReplicaFailed, Server, error_text
from whet.errors import ConfigError, EngineError, RequestError
from whet.types import Sampling, StopReason

logger = logging.getLogger(__name__)

OLDEST = "0.10.2"
"""The first version whose completions tell token ids."""
TOKENS_PATH, COMPLETIONS_PATH = "/inference/v1/generate", "/v1/completions"
CUT_OFF = -9000.0
"""vLLM writes -9999 for the log-probability of what top-k and top-p leave out."""
LOAD_S = 600.0
"""For weights to be loaded."""
PROBE_S = 300.0
"""For the first answer, which may have to wait for compilation."""
RAW = (
    "this vLLM tells log-probabilities as they are before temperature, top_p and top_k: start it "
    "with --logprobs-mode processed_logprobs, or sample at temperature 1 (or 0) without top_p and "
    "top_k"
)


class VLLM(Server):
    """What one or several equal vLLM servers can do, as they showed when they were asked."""

    name = "vLLM"

    def __init__(self, *, model: str, context_length: int) -> None:
        self.model = model
        """What the server calls the model it was started with."""
        self.context_length = context_length
        self.path = COMPLETIONS_PATH
        self.processed = True
        """Whether log-probabilities are those of the distribution that was sampled."""
        self.grammars = True
        """Whether it takes our grammars."""
        self.device = ""
        self.max_loras: int | None = None
        """As far as it tells them: in its development mode."""

    def body(self, request: Request, weights: ServedWeights, *, stream: bool) -> Json:
        sampling = request.sampling
        self._check(sampling)
        how: dict[str, Any] = {
            # A model's generation_config.json may have other defaults: nothing is left to them.
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": request.limit,
            "logprobs": sampling.top_logprobs,
            # What ends a turn is the gateway's to say.
            "ignore_eos": True,
            "stop_token_ids": list(sampling.stop_ids),
            "skip_special_tokens": False,
        }
        if sampling.seed is not None:
            how["seed"] = sampling.seed % 2**63
        if sampling.grammar is not None:
            how["structured_outputs"] = {"grammar": sampling.grammar}
        model = weights.model or self.model
        if self.path == TOKENS_PATH:
            return {
                "model": model,
                "token_ids": request.tokens,
                "sampling_params": how | {"detokenize": False},
                "stream": stream,
            }
        return how | {
            "model": model,
            "prompt": request.tokens,
            "stream": stream,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }

    def read(self, said: Json, request: Request) -> Drawn:
        [choice] = said["choices"]
        tokens: list[int] = choice.get("token_ids") or []
        told: Json = choice.get("logprobs") or {}
        logprobs: list[float] = told.get("token_logprobs") or []
        if "content" in told:
            logprobs = [token["logprob"] for token in told["content"]]
        wanted = request.sampling.top_logprobs
        tops = [top[:wanted] for top in _tops(told)] if wanted else []
        if len(tokens) != len(logprobs):
            raise ReplicaFailed(f"it tells {len(tokens)} tokens, {len(logprobs)} log-probabilities")
        return Drawn(tokens, logprobs, tops, _end(choice.get("finish_reason")))

    async def check(self, http: Http, url: str) -> None:
        status, said = await http.ask(f"{url}/health")
        if status != 200:
            raise ReplicaFailed(f"/health answers {status}: {error_text(str(said))}")

    async def put(self, http: Http, url: str, weights: ServedWeights) -> None:
        match weights.kind:
            case "base":
                return
            case "lora":
                await self._load_adapter(http, url, weights)
            case "full":
                await self._reload(http, url, weights)

    async def drop(self, http: Http, url: str, model: str) -> None:
        await http.ask(f"{url}/v1/unload_lora_adapter", {"lora_name": model})

    async def _load_adapter(self, http: Http, url: str, weights: ServedWeights) -> None:
        if self.max_loras is not None and self.max_loras < weights.slots:
            raise EngineError(
                f"the vLLM at {url} has --max-loras {self.max_loras}, but {weights.slots} versions "
                f"may be sampled from at once: start it with --max-loras {weights.slots}"
            )
        adapter = {"lora_name": weights.model, "lora_path": str(weights.folder)}
        status, said = await http.ask(f"{url}/v1/load_lora_adapter", adapter, timeout_s=LOAD_S)
        text = error_text(said if isinstance(said, str) else json.dumps(said))
        if status == 404 and "Not Found" in text:
            raise EngineError(
                f"the vLLM at {url} takes no adapters: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment (vLLM 0.10.2 or newer)"
            )
        if status != 200 and "already been loaded" not in text:
            raise EngineError(f"the vLLM at {url} cannot load the adapter: {status}, {text}")

    async def _reload(self, http: Http, url: str, weights: ServedWeights) -> None:
        if self.device == "cpu" and _is_tied(weights.folder):
            # It packs the output layer once, and does not when the embedding it shares changes.
            raise EngineError(
                f"the vLLM at {url} runs on a CPU, where it keeps the old output layer of a model "
                "whose embeddings are tied: set trainer.weights to 'lora'"
            )
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
        status, said = await http.ask(f"{url}/collective_rpc", body, timeout_s=LOAD_S)
        if status == 404:
            raise EngineError(
                f"the vLLM at {url} takes no weights while it runs: start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment, or set trainer.weights to 'lora'"
            )
        if status != 200:
            text = error_text(said if isinstance(said, str) else json.dumps(said))
            raise EngineError(
                f"the vLLM at {url} cannot load weights while it runs ({status}, {text}): "
                "use vLLM 0.17 or newer, or set trainer.weights to 'lora'"
            )
        # Keys and values of the weights before are of no use.
        await http.ask(f"{url}/reset_prefix_cache", {})

    def _check(self, sampling: Sampling) -> None:
        shaped = sampling.temperature not in (0, 1) or sampling.top_p < 1 or sampling.top_k
        if shaped and not self.processed:
            raise RequestError(RAW)
        if sampling.grammar is not None and not self.grammars:
            raise RequestError(
                "this vLLM cannot hold its samples to our grammar: start it with "
                """--structured-outputs-config '{"backend": "guidance"}'"""
            )


async def find_vllm(http: Http, urls: Sequence[str], *, say: Callable[[str], None]) -> VLLM:
    """What the servers at these addresses can do: all of them the same, or it is an error.

    Raises:
        ConfigError: one is no vLLM, is too old, or differs from the others.
    """
    found = await asyncio.gather(*(_probe(http, url) for url in urls))
    first = found[0]
    for url, other in zip(urls, found, strict=True):
        if vars(other) != vars(first):
            different = [k for k, v in vars(other).items() if v != vars(first)[k]]
            raise ConfigError(
                f"the vLLM servers at {urls[0]} and {url} differ ({', '.join(different)}): start "
                "them with the same model and flags"
            )
    if not first.processed:
        say(f"note: {RAW}")
    return first


async def _probe(http: Http, url: str) -> VLLM:
    version = await _version(http, url)
    model, context_length = await _model(http, url)
    found = VLLM(model=model, context_length=context_length)
    # The likeliest of one token has probability 1, unless log-probabilities are told as they were
    # before the others were left out.
    sampling = Sampling(top_k=1, max_tokens=1)
    request = Request(tokens=[0, 1], sampling=sampling, limit=1, stream=False, seed=0)
    for found.path in (TOKENS_PATH, COMPLETIONS_PATH):
        body = found.body(request, ServedWeights(0), stream=False)
        status, said = await _ask(http, url + found.path, body)
        if status == 200:
            break
    else:
        raise ConfigError(
            f"vLLM {version} at {url} does not sample from token ids ({status}, "
            f"{error_text(json.dumps(said))}): use {OLDEST} or newer"
        )
    try:
        drawn = found.read(said, request)
    except (ReplicaFailed, LookupError, TypeError, ValueError):
        drawn = None
    if drawn is None or not drawn.tokens:
        raise ConfigError(
            f"vLLM {version} at {url} does not tell the token ids it samples (return_token_ids is "
            f"missing): use {OLDEST} or newer"
        )
    found.device, found.max_loras = await _told(http, url)
    found.processed = drawn.logprobs[0] > -1e-3
    found.grammars = await _takes_grammars(http, url, found)
    return found


async def _takes_grammars(http: Http, url: str, found: VLLM) -> bool:
    """Whether Lark text of llguidance's dialect is understood, by a schema inside a rule."""
    sampling = Sampling(grammar='start: %json {"type": "boolean"}', max_tokens=1)
    request = Request(tokens=[0, 1], sampling=sampling, limit=1, stream=False, seed=0)
    body = found.body(request, ServedWeights(0), stream=False)
    status, _ = await _ask(http, url + found.path, body)
    return status == 200


async def _told(http: Http, url: str) -> tuple[str, int | None]:
    """Device and `--max-loras`, where a server tells how it was started."""
    _, said = await _ask(http, f"{url}/server_info?config_format=json")
    match said:
        case {"vllm_config": {"device_config": {"device": str(device)}, "lora_config": lora}}:
            return device, lora["max_loras"] if lora else None
        case _:
            return "", None


def _is_tied(folder: Path | None) -> bool:
    if folder is None:
        return False
    config = json.loads((folder / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", True))


async def _version(http: Http, url: str) -> str:
    status, said = await _ask(http, f"{url}/version")
    if status != 200 or not isinstance(said, dict) or "version" not in said:
        raise ConfigError(f"there is no vLLM at {url}: /version answers {status}")
    return str(cast(dict[str, Any], said)["version"])


async def _model(http: Http, url: str) -> tuple[str, int]:
    status, said = await _ask(http, f"{url}/v1/models")
    match said:
        case {"data": [{"id": str(model), "max_model_len": int(length)}, *_]}:
            return model, length
        case _:
            raise ConfigError(
                f"the vLLM at {url} does not say which model it serves: /v1/models answers {status}"
            )


async def _ask(http: Http, url: str, body: Json | None = None) -> tuple[int, Any]:
    try:
        return await http.ask(url, body, timeout_s=PROBE_S)
    except ReplicaFailed as error:
        raise ConfigError(f"the vLLM at {url} does not answer: {error}") from error


def _tops(told: Json) -> list[Top]:
    """The likeliest tokens at each place, of either form of log-probabilities."""
    named: list[dict[str, float]] = told.get("top_logprobs") or []
    if "content" in told:
        named = [
            {str(other["token_id"]): other["logprob"] for other in token["top_logprobs"]}
            for token in told["content"]
        ]
    return [
        tuple(
            (int(name.removeprefix("token_id:")), value)
            for name, value in sorted(top.items(), key=lambda pair: -pair[1])
            if value > CUT_OFF
        )
        for top in named
    ]


def _end(reason: str | None) -> StopReason | None:
    if reason in (None, "stop", "length"):
        return reason
    raise ReplicaFailed(f"its answer ended by {reason!r}")
