"""A model at a Tinker service: the only file of the trainer and the engine that uses `tinker`.

Trainer and engine share it as the local ones share a model. There are no retries or timeouts of
our own: the client has both. It must not be used before a fork.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tinker
from anyio import move_on_after
from numpy.typing import NDArray
from tinker import types

from whet.config import AdamStep, RunConfig, TinkerConfig
from whet.errors import ConfigError, EngineError, RequestError, TrainerError, boundary
from whet.io.http_client import HttpClient
from whet.types import Sampling, StopReason

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]

KEPT = 2
"""Published samplers kept at the service: the previous one may still be in use."""


CLOSE_TIMEOUT_S = 10.0
"""Time to end a session, for a service that may be away; its own timeout ends it otherwise."""


class TinkerDatum(NamedTuple):
    """A sequence with the loss inputs at each of its positions."""

    tokens: Sequence[int]
    inputs: Mapping[str, Floats | NDArray[np.int64]]


class TinkerSample(NamedTuple):
    """One sampled continuation."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[tuple[tuple[int, float], ...]]
    stop: StopReason
    version: int


class TinkerPolicy:
    """LoRA adapters at a service, and a sampler of the weights published last."""

    def __init__(self, service: tinker.ServiceClient, config: RunConfig, context: int) -> None:
        """Use `connect` or `open` instead."""
        self._service = service
        self._config = config
        self._settings = read_service_settings(config)
        self._training: tinker.TrainingClient | None = None
        self._sampling: tinker.SamplingClient | None = None
        self.context_length = context
        self.version = 0
        self.revision = 0
        """Number of weight changes."""
        self.served = 0
        """Version that is served."""
        self._sampler = ""
        """Path of the served weights at the service."""
        self._samplers: list[str] = []
        """Paths of published weights still at the service, oldest first."""

    @classmethod
    async def connect(cls, config: RunConfig) -> "TinkerPolicy":
        """Connect to sample from what another process trains.

        Raises:
            ConfigError: the service cannot be reached, or has no such model.
        """
        with boundary(ConfigError, "cannot reach the Tinker service"):
            service = tinker.ServiceClient(base_url=read_service_settings(config).base_url)
            found = await service.get_server_capabilities_async()
        wanted = read_base_model(config)
        models = {m.model_name or "": m for m in found.supported_models}
        model = models.get(wanted) or (next(iter(models.values())) if len(models) == 1 else None)
        if model is None:
            raise ConfigError(f"the service does not serve {wanted!r}: it has {', '.join(models)}")
        return cls(service, config, model.max_context_length or 32_768)

    @classmethod
    async def open(cls, config: RunConfig) -> "TinkerPolicy":
        """Create adapters to train. Raises as `connect` does."""
        policy, wanted = await cls.connect(config), read_base_model(config)
        settings = read_service_settings(config)
        layers = settings.lora_layers
        with boundary(ConfigError, f"the service cannot train {wanted!r}"):
            policy._training = await policy._service.create_lora_training_client_async(
                base_model=wanted,
                rank=settings.lora_rank,
                seed=config.seed,
                train_attn="attention" in layers,
                train_mlp="mlp" in layers,
                train_unembed="head" in layers,
            )
        return policy

    async def close(self) -> None:
        """End the session: the service releases its adapters, and saved weights stay.

        An open session keeps them in the service's memory for as long as this process lives.
        """
        with move_on_after(CLOSE_TIMEOUT_S, shield=True), suppress(tinker.TinkerError):
            await self._service.close("success")

    # ----------------------------------------------------------------- training

    async def forward_backward(
        self, data: Sequence[TinkerDatum], loss: str, settings: Mapping[str, float]
    ) -> tuple[list[Floats], float]:
        """Accumulate a gradient; return the log-probabilities of all targets, and the loss."""
        sent = [
            types.Datum(
                model_input=types.ModelInput.from_ints(list(datum.tokens)),
                loss_fn_inputs={
                    name: types.TensorData.from_numpy(values)
                    for name, values in datum.inputs.items()
                },
            )
            for datum in data
        ]
        with boundary(TrainerError, "the Tinker service cannot train"):
            future = await self._client.forward_backward_async(
                sent,
                loss,  # pyright: ignore[reportArgumentType] - one of its literals
                dict(settings),
            )
            found = await future
        logprobs = [np.asarray(out["logprobs"].data, np.float32) for out in found.loss_fn_outputs]
        return logprobs, found.metrics["loss:sum"]

    async def optim_step(self, adam: AdamStep) -> dict[str, float]:
        params = types.AdamParams(
            learning_rate=adam.lr,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip_norm=adam.max_grad_norm,
        )
        with boundary(TrainerError, "the Tinker service cannot step"):
            found = await (await self._client.optim_step_async(params))
        self.version, self.revision = self.version + 1, self.revision + 1
        return dict(found.metrics or {})

    async def publish(self) -> None:
        """Serve the current weights."""
        with boundary(TrainerError, "the Tinker service cannot publish"):
            saved = await (await self._client.save_weights_for_sampler_async(self._name()))
        await self.sample_from(saved.path, self.version)
        self._samplers.append(saved.path)
        behind = self._config.loop.max_staleness if self._config.loop.name == "overlapped" else 0
        while len(self._samplers) > KEPT + behind:
            await self.delete(self._samplers.pop(0))

    async def export_weights(self, file: Path) -> str:
        """Return the path of the published weights; no file is written."""
        return self._sampler

    async def save(self) -> str:
        """Save weights and optimizer at the service; return the path."""
        with boundary(TrainerError, "the Tinker service cannot save"):
            return (await (await self._client.save_state_async(self._name()))).path

    async def restore(self, path: str, version: int) -> None:
        """Load saved weights and optimizer."""
        with boundary(TrainerError, f"the Tinker service cannot restore {path!r}"):
            self._training = (
                await self._service.create_training_client_from_state_with_optimizer_async(path)
            )
        self.version, self.revision = version, self.revision + 1

    async def delete(self, path: str) -> None:
        """Delete saved weights; a failure is logged, since it only costs space."""
        try:
            with boundary(TrainerError, "the Tinker service cannot delete"):
                rest = tinker.RestClient(base_url=self._settings.base_url)
                await rest.delete_checkpoint_from_tinker_path_async(path)
        except TrainerError as error:
            logger.warning("checkpoint not deleted path=%s reason=%s", path, error)

    async def export(self) -> dict[str, bytes]:
        """Return the adapters as files for other tools."""
        with boundary(TrainerError, "the Tinker service cannot export"):
            saved = await (await self._client.save_weights_external_async(self._name()))
            rest = tinker.RestClient(base_url=self._settings.base_url)
            found = await rest.get_external_weights_urls_async(saved.path)
            return await _fetch(found.urls)

    # ----------------------------------------------------------------- sampling

    async def sample_from(self, path: str, version: int) -> None:
        """Serve the weights published as `path`; an empty path is the base model.

        Raises:
            EngineError: the service has no such weights.
        """
        base = None if path else read_base_model(self._config)
        with boundary(EngineError, f"the Tinker service cannot sample from {path or base!r}"):
            self._sampling = await self._service.create_sampling_client_async(path or None, base)
        self._sampler, self.served = path, version

    async def sample(self, prompt: Sequence[int], sampling: Sampling, limit: int) -> TinkerSample:
        """Sample one continuation that ends at stop ids; the engine finds stop strings.

        Raises:
            RequestError: the service rejects the request.
            EngineError: anything else.
        """
        if self._sampling is None:
            raise EngineError("no weights were published yet")
        version, top = self.served, sampling.top_logprobs
        params = types.SamplingParams(
            max_tokens=limit,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            stop=list(sampling.stop_ids),  # empty, not None, where there are none
            seed=sampling.seed,
        )
        text = types.ModelInput.from_ints(list(prompt))
        try:
            with boundary(EngineError, "the Tinker service cannot sample"):
                found = await self._sampling.sample_async(text, 1, params, topk_sample_logprobs=top)
        except EngineError as error:
            cause = error.__cause__
            if isinstance(cause, tinker.RequestFailedError) and cause.category == "user":
                raise RequestError(str(error)) from error
            raise
        [one] = found.sequences
        if one.logprobs is None:
            where = self._settings.base_url or os.environ.get("TINKER_BASE_URL", "hosted")
            raise EngineError(
                f"the Tinker service ({where}) returned no log-probabilities for samples of "
                f"{self._sampler!r}, so it cannot be trained: set trainer.base_url to one that does"
            )
        tops = [tuple(t or ()) for t in one.topk_logprobs or []] if top else []
        return TinkerSample(list(one.tokens), list(one.logprobs), tops, one.stop_reason, version)

    @property
    def _client(self) -> tinker.TrainingClient:
        assert self._training is not None
        return self._training

    def _name(self) -> str:
        return f"{self.version:06d}-{os.urandom(4).hex()}"


def read_service_settings(config: RunConfig) -> TinkerConfig:
    """Return the settings of the service."""
    assert isinstance(config.trainer, TinkerConfig)
    return config.trainer


def read_base_model(config: RunConfig) -> str:
    """Return the service's name of the base model."""
    if (name := read_service_settings(config).base_model) is not None:
        return name
    folder = Path(os.path.expanduser(config.model))
    return str(folder.absolute()) if folder.is_dir() else config.model


async def _fetch(urls: Mapping[str, str]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    async with HttpClient() as http:
        for name, url in urls.items():
            reply = await http.request("GET", url)
            if reply.status != 200:
                raise TrainerError(f"cannot download {name!r}: status {reply.status}")
            files[name] = reply.body
    return files
