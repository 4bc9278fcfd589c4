"""Weights on their way from the trainer's process to the engine's: a file, and a resource."""

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import anyio
from pydantic import ValidationError

from whet.config import AdamConfig, LossConfig, RunConfig, TinkerConfig, TrainerConfig
from whet.errors import EngineError, NotFound, StoreError
from whet.policies.catalogue import available, resolve_model
from whet.protocols import Resources, Trainer
from whet.runners.given import POLICY
from whet.types import Attempt, Metrics, Resource, Row, Value

logger = logging.getLogger(__name__)

LOOKED_UP_S = 1.0
"""How long it is believed to be the newest for attempts that do not say which they want."""

LOAD_TIMEOUT_S = 60.0
"""How long a request waits for weights; it is then told to come again."""


class PublishedPolicy(Value):
    """What an engine elsewhere needs to serve a policy."""

    model: str
    trainer: TrainerConfig
    seed: int
    version: int
    """Of the weights; the resource's own counts publications."""
    weights: str
    """The file, which trainer and engines must both see, or the path at a Tinker service; empty
    for the model's own."""
    staleness: int = 0
    """Updates that tokens may be behind: so many versions may be sampled from at once, and one."""
    tinker: TinkerConfig = TinkerConfig()
    """The service that has the weights, where one trains."""

    def is_served_by(self, other: "PublishedPolicy") -> bool:
        """Whether an engine made for the other can load these weights."""
        return self._shape() == other._shape()

    def _shape(self) -> tuple[str | int | None, ...]:
        trainer = self.trainer
        if trainer.kind == "tinker":  # which knows the adapters' shape by their path
            return self.model, trainer.kind, self.tinker.base_url, self.tinker.base_model
        shape = self.model, trainer.kind, trainer.weights, trainer.precision
        if trainer.weights == "full":
            return shape
        return *shape, trainer.lora_rank, trainer.lora_alpha, *trainer.lora_layers


async def announce_model(resources: Resources, config: RunConfig) -> None:
    """Say which model is to be served where nobody trains it, unless somebody said so before."""
    try:
        await resources.latest(POLICY)
    except NotFound:
        model = resolve_model(config.model)
        await resources.publish(
            POLICY, describe_policy(config, model, 0, "").model_dump(mode="json")
        )


def describe_policy(config: RunConfig, model: Path, version: int, weights: str) -> PublishedPolicy:
    """A policy of a run; without a file of weights, the model as it is."""
    named = config.model in (info.name for info in available())
    return PublishedPolicy(
        model=config.model if named else str(model.absolute()),
        trainer=config.trainer,
        seed=config.seed,
        version=version,
        weights=weights,
        staleness=config.loop.max_staleness if config.loop.name == "overlapped" else 0,
        tinker=config.tinker,
    )


def read_policy(resource: Resource) -> PublishedPolicy:
    """What a `policy` resource says. Raises StoreError for one that is none."""
    try:
        return PublishedPolicy.model_validate(resource.value)
    except ValidationError as error:
        raise StoreError(
            f"version {resource.version} of resource {POLICY!r} is no policy of `whet train`: "
            f"{error.errors()[0]['msg']}"
        ) from error


class TrainedPolicy(Protocol):
    """The weights that a trainer changes."""

    @property
    def edition(self) -> int:
        """How often they were changed."""
        ...

    async def hand_over(self, file: Path) -> str:
        """Let engines elsewhere have the weights as they are, in this file if they need one.

        Returns what such an engine loads.
        """
        ...


class PublishingTrainer(Trainer):
    """A trainer whose engines are elsewhere: publishing writes the weights and tells the store."""

    def __init__(
        self,
        trainer: Trainer,
        policy: TrainedPolicy,
        config: RunConfig,
        *,
        model: Path,
        resources: Resources,
        folder: Path,
    ) -> None:
        self._trainer = trainer
        self._policy = policy
        self._config = config
        self._model = model
        self._resources = resources
        self._folder = folder.absolute()
        self._published: int | None = None
        """The edition of the weights that were published last."""

    async def publish(self) -> int:
        version = await self._trainer.publish()
        if self._published == self._policy.edition:
            return version
        last = await self._last()
        # Whoever began with this version before a kill has the very same weights: between their
        # publication and the commit of their step nothing is sampled.
        if not (self._published is None and last and self._still_serves(last, version)):
            await self._publish(version, last)
        self._published = self._policy.edition
        return version

    async def _publish(self, version: int, last: PublishedPolicy | None) -> None:
        file = self._folder / f"{version:06d}-{secrets.token_hex(4)}.safetensors"
        weights = await self._policy.hand_over(file)
        policy = describe_policy(self._config, self._model, version, weights)
        number = await self._resources.publish(POLICY, policy.model_dump(mode="json"))
        logger.info("policy published version=%d resource=%d", version, number)
        # An engine may be reading the one before; if it comes too late, it finds the newer one.
        for old in self._folder.glob("*"):
            if old != file and (last is None or old != Path(last.weights)):
                old.unlink(missing_ok=True)

    def _still_serves(self, last: PublishedPolicy, version: int) -> bool:
        same = describe_policy(self._config, self._model, version, last.weights)
        return last == same and Path(last.weights).is_file()

    async def _last(self) -> PublishedPolicy | None:
        try:
            return read_policy(await self._resources.latest(POLICY))
        except NotFound:
            return None

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        return await self._trainer.forward_backward(rows, loss)

    async def optim_step(self, adam: AdamConfig) -> Metrics:
        return await self._trainer.optim_step(adam)

    async def save(self, folder: Path) -> None:
        await self._trainer.save(folder)

    async def restore(self, folder: Path) -> None:
        await self._trainer.restore(folder)

    async def export(self, folder: Path) -> None:
        await self._trainer.export(folder)


class ServedPolicy(Protocol):
    """What an engine samples from, wherever that is."""

    @property
    def version(self) -> int:
        """Of the weights."""
        ...

    async def load(self, published: PublishedPolicy) -> None:
        """Have whatever is sampled from now on be of these weights.

        Raises:
            EngineError: they cannot be had.
        """
        ...


class PolicyFollower:
    """Keeps an engine's policy at what the run has published, as soon as an attempt needs it.

    An attempt is pinned at its claim to a publication, so a step that begins after one is sampled
    by those weights or newer ones, whoever serves it and without anybody waiting for all engines.
    """

    def __init__(
        self, weights: ServedPolicy, served: PublishedPolicy, resources: Resources
    ) -> None:
        self._weights = weights
        self._served = served
        self._resources = resources
        self._at = 0
        """Version of the resource whose weights are loaded."""
        self._looked_up = float("-inf")
        self._loading = anyio.Lock()

    async def prepare(self, attempt: Attempt) -> None:
        """Return once weights as new as the attempt's are served.

        Raises:
            EngineError: they cannot be had; asking again may help.
        """
        wanted = attempt.resources.get(POLICY)
        if self._is_due(wanted):
            with anyio.move_on_after(LOAD_TIMEOUT_S) as scope:
                async with self._loading:
                    if self._is_due(wanted):
                        await self.load_newest()
            if scope.cancelled_caught:
                raise EngineError(f"loading version {wanted} of the policy takes long: ask again")

    def _is_due(self, wanted: int | None) -> bool:
        if wanted is None:
            return anyio.current_time() >= self._looked_up + LOOKED_UP_S
        return wanted > self._at

    async def load_newest(self) -> None:
        """Serve the newest publication, if there is any."""
        while True:
            self._looked_up = anyio.current_time()
            try:
                newest = await self._resources.latest(POLICY)
            except NotFound:
                return
            if newest.version == self._at:
                return
            published = read_policy(newest)
            if not published.is_served_by(self._served):
                raise EngineError(
                    f"this gateway serves {self._served.model!r}, but the run now trains "
                    f"{published.model!r} or with other trainer settings: restart `whet serve`"
                )
            try:
                await self._weights.load(published)
            except EngineError:
                if (await self._resources.latest(POLICY)).version == newest.version:
                    raise
                continue  # a newer one came, and the file of this one went
            self._at = newest.version
            logger.info("policy loaded version=%d resource=%d", published.version, newest.version)
