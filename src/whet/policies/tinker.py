"""A policy that a service has: the only file that knows the `tinker` client.

Trainer and engine share it as the local ones share a model. Nothing here retries or times out: the
client does both. It must not be used before a fork.
"""

import logging
import os
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tinker
from anyio import to_thread
from numpy.typing import NDArray
from tinker import types

from whet.config import AdamConfig, RunConfig
from whet.errors import ConfigError, EngineError, RequestError, TrainerError, boundary
from whet.types import Sampling, StopReason

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]

KEPT = 2
"""Samplers that stay at the service: the one before the last may still be sampled from."""


class Datum(NamedTuple):
    """A sequence and what a loss needs at each of its positions."""

    tokens: Sequence[int]
    inputs: Mapping[str, Floats | NDArray[np.int64]]


class Sampled(NamedTuple):
    """One continuation."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[tuple[tuple[int, float], ...]]
    stop: StopReason
    version: int


class TinkerPolicy:
    """Adapters at a service, and a sampler of what was published of them last."""

    def __init__(self, service: tinker.ServiceClient, config: RunConfig, context: int) -> None:
        """For `join` and `open`."""
        self._service = service
        self._config = config
        self._training: tinker.TrainingClient | None = None
        self._sampling: tinker.SamplingClient | None = None
        self.context_length = context
        self.version = 0
        self.edition = 0
        """How often the weights were changed."""
        self.served = 0
        """The version that is sampled from."""
        self._sampler = ""
        """Its path at the service."""
        self._samplers: list[str] = []
        """What was published and is still there, oldest first."""

    @classmethod
    async def join(cls, config: RunConfig) -> "TinkerPolicy":
        """What another process trains, to be sampled from.

        Raises:
            ConfigError: the service cannot be had, or has no such model.
        """
        with boundary(ConfigError, "cannot reach the Tinker service"):
            service = tinker.ServiceClient(base_url=config.tinker.base_url)
            found = await service.get_server_capabilities_async()
        wanted = base_model(config)
        models = {m.model_name or "": m for m in found.supported_models}
        model = models.get(wanted) or (next(iter(models.values())) if len(models) == 1 else None)
        if model is None:
            raise ConfigError(f"the service has no {wanted!r}; it has {', '.join(models)}")
        return cls(service, config, model.max_context_length or 32_768)

    @classmethod
    async def open(cls, config: RunConfig) -> "TinkerPolicy":
        """New adapters. Raises as `join` does."""
        policy, wanted = await cls.join(config), base_model(config)
        layers = config.trainer.lora_layers
        with boundary(ConfigError, f"the service cannot train {wanted!r}"):
            policy._training = await policy._service.create_lora_training_client_async(
                base_model=wanted,
                rank=config.trainer.lora_rank,
                seed=config.seed,
                train_attn="attention" in layers,
                train_mlp="mlp" in layers,
                train_unembed="head" in layers,
            )
        return policy

    # ----------------------------------------------------------------- training

    async def forward_backward(
        self, data: Sequence[Datum], loss: str, settings: Mapping[str, float]
    ) -> tuple[list[Floats], float]:
        """Add a gradient; returns the log-probabilities of all targets, and the loss."""
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

    async def optim_step(self, adam: AdamConfig) -> dict[str, float]:
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
        self.version, self.edition = self.version + 1, self.edition + 1
        return dict(found.metrics or {})

    async def publish(self) -> None:
        """Sample from the weights as they are now."""
        with boundary(TrainerError, "the Tinker service cannot publish"):
            saved = await (await self._client.save_weights_for_sampler_async(self._name()))
        await self.sample_from(saved.path, self.version)
        self._samplers.append(saved.path)
        behind = self._config.loop.max_staleness if self._config.loop.name == "overlapped" else 0
        while len(self._samplers) > KEPT + behind:
            await self.forget(self._samplers.pop(0))

    async def hand_over(self, file: Path) -> str:
        """The path of what is published; no file is needed."""
        return self._sampler

    async def save(self) -> str:
        """Keep weights and optimizer; returns where."""
        with boundary(TrainerError, "the Tinker service cannot save"):
            return (await (await self._client.save_state_async(self._name()))).path

    async def restore(self, path: str, version: int) -> None:
        """Go on from what was saved, with its optimizer."""
        with boundary(TrainerError, f"the Tinker service cannot restore {path!r}"):
            self._training = (
                await self._service.create_training_client_from_state_with_optimizer_async(path)
            )
        self.version, self.edition = version, self.edition + 1

    async def forget(self, path: str) -> None:
        """Delete something saved. What cannot be deleted stays, and takes nothing but room."""
        try:
            with boundary(TrainerError, "the Tinker service cannot delete"):
                rest = tinker.RestClient(base_url=self._config.tinker.base_url)
                await rest.delete_checkpoint_from_tinker_path_async(path)
        except TrainerError as error:
            logger.warning("checkpoint not deleted path=%s reason=%s", path, error)

    async def export(self) -> dict[str, bytes]:
        """The adapters as files that other tools load."""
        with boundary(TrainerError, "the Tinker service cannot export"):
            saved = await (await self._client.save_weights_external_async(self._name()))
            rest = tinker.RestClient(base_url=self._config.tinker.base_url)
            found = await rest.get_external_weights_urls_async(saved.path)
            return await to_thread.run_sync(_fetch, found.urls)

    # ----------------------------------------------------------------- sampling

    async def sample_from(self, path: str, version: int) -> None:
        """Sample from what was published as `path`, or if it is empty from the model itself.

        Raises:
            EngineError: the service has no such weights.
        """
        base = None if path else base_model(self._config)
        with boundary(EngineError, f"the Tinker service cannot sample from {path or base!r}"):
            self._sampling = await self._service.create_sampling_client_async(path or None, base)
        self._sampler, self.served = path, version

    async def sample(self, prompt: Sequence[int], sampling: Sampling, limit: int) -> Sampled:
        """One continuation, which ends at stop ids alone: stop strings are the engine's to find.

        Raises:
            RequestError: the service refuses the request.
            EngineError: anything else.
        """
        if self._sampling is None:
            raise EngineError("nothing was published yet")
        version, top = self.served, sampling.top_logprobs
        params = types.SamplingParams(
            max_tokens=limit,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            stop=list(sampling.stop_ids),  # none at all is an empty list
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
            where = self._config.tinker.base_url or os.environ.get("TINKER_BASE_URL", "hosted")
            raise EngineError(
                f"the Tinker service ({where}) gave no log-probabilities for what it sampled from "
                f"{self._sampler!r}, so it cannot be trained: set tinker.base_url to one that does"
            )
        tops = [tuple(t or ()) for t in one.topk_logprobs or []] if top else []
        return Sampled(list(one.tokens), list(one.logprobs), tops, one.stop_reason, version)

    @property
    def _client(self) -> tinker.TrainingClient:
        assert self._training is not None
        return self._training

    def _name(self) -> str:
        return f"{self.version:06d}-{os.urandom(4).hex()}"


def base_model(config: RunConfig) -> str:
    """What the service calls the model."""
    if config.tinker.base_model is not None:
        return config.tinker.base_model
    folder = Path(os.path.expanduser(config.model))
    return str(folder.absolute()) if folder.is_dir() else config.model


def _fetch(urls: Mapping[str, str]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name, url in urls.items():
        with urllib.request.urlopen(url) as reply:
            files[name] = reply.read()
    return files
