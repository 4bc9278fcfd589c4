"""Weight synchronization between processes.

A trainer writes the weights to a file and publishes its location as a resource; engines load it.
"""

import logging
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
from pydantic import ValidationError

from whet.config import (
    AdamStep,
    AlgorithmConfig,
    LossConfig,
    RunConfig,
    TinkerConfig,
    TrainerConfig,
    VerlConfig,
)
from whet.errors import ConfigError, EngineError, NotFound, StoreError
from whet.models.catalog import list_models, resolve_model
from whet.protocols import Resources, StepLog, Store, TrainingBackend
from whet.runners.agent import POLICY
from whet.types import (
    NO_ADVANTAGES,
    POLICY_PREFIX,
    TRAINER,
    Attempt,
    GenerationId,
    Metrics,
    Resource,
    Row,
    StepRecord,
    Value,
)

logger = logging.getLogger(__name__)

NEWEST_TTL_S = 1.0
"""Seconds between lookups of the newest policy, for attempts that are pinned to none."""

LOAD_TIMEOUT_S = 60.0
"""Seconds a request waits for weights before it is refused, to be retried."""


class PublishedPolicy(Value):
    """Value of the `policy` resource: what an engine of another process loads."""

    model: str
    trainer: TrainerConfig
    seed: int
    version: int
    """Version of the weights; the resource's own version counts publications."""
    weights: str
    """The file, on a disk that trainer and engines share, or the path at a Tinker service; empty
    for the weights of the model itself."""
    algorithm: AlgorithmConfig | None = None
    """Settings of the algorithm that reads posted rewards; None if they are unknown."""
    staleness: int = 0
    """Updates that sampled tokens may be behind: up to one more version is sampled at once."""

    def is_served_by(self, other: "PublishedPolicy") -> bool:
        """Whether an engine opened for the other policy can load these weights."""
        return self._describe_weights() == other._describe_weights()

    def _describe_weights(self) -> tuple[str | int | None, ...]:
        trainer = self.trainer
        if isinstance(trainer, TinkerConfig):  # it knows the adapters' shape by their path
            return self.model, trainer.kind, trainer.base_url, trainer.base_model
        if isinstance(trainer, VerlConfig):  # its servers load nothing that is published
            return self.model, trainer.kind
        shape = self.model, trainer.kind, trainer.weights, trainer.precision
        if trainer.weights == "full":
            return shape
        return *shape, trainer.lora_rank, trainer.lora_alpha, *trainer.lora_layers


def name_policy_resource(name: str) -> str:
    """Name of the resource that locates the weights of a policy; that of the only one is empty."""
    return POLICY_PREFIX + name if name else POLICY


async def announce_model(resources: Resources, config: RunConfig) -> None:
    """Publish the model to serve in a run that trains none, unless a policy is published."""
    try:
        await resources.latest(POLICY)
    except NotFound:
        if config.initial_weights is not None:
            raise ConfigError(
                "a run that trains nothing starts from a model folder: merge its start "
                "into the base model"
            ) from None
        model = resolve_model(config.model)
        policy = describe_policy(config, model, 0, "").model_copy(update={"algorithm": None})
        await resources.publish(POLICY, policy.model_dump(mode="json"))


def describe_policy(config: RunConfig, model: Path, version: int, weights: str) -> PublishedPolicy:
    """The policy of a run to publish; `weights` is empty for the model itself."""
    named = config.model in (info.name for info in list_models())
    return PublishedPolicy(
        model=config.model if named else str(model.absolute()),
        trainer=config.trainer,
        seed=config.seed,
        version=version,
        weights=weights,
        algorithm=config.algorithm,
        staleness=config.loop.max_staleness if config.loop.name == "overlapped" else 0,
    )


def read_policy(resource: Resource) -> PublishedPolicy:
    """Parse a `policy` resource. Raises StoreError if it is not one."""
    try:
        return PublishedPolicy.model_validate(resource.value)
    except ValidationError as error:
        raise StoreError(
            f"resource {resource.name!r} version {resource.version} was not written by a "
            f"trainer: {error.errors()[0]['msg']}"
        ) from error


async def read_policies(resources: Resources) -> list[PublishedPolicy]:
    """The newest policies of a run."""
    return [
        read_policy(resource)
        for resource in await resources.resources()
        if resource.name == POLICY or resource.name.startswith(POLICY_PREFIX)
    ]


class TrainerLease(StepLog):
    """Ownership of a run's training, among trainers that share a store.

    Its epoch is the version of the resource `trainer` that this process has published. The store
    refuses steps and policies of an older epoch, so a trainer that was suspended, or is started
    twice, cannot replace the weights of the one that took over.
    """

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self.epoch = epoch

    @classmethod
    async def acquire(
        cls, store: Store, folder: Path, progress: Callable[[str], None]
    ) -> "TrainerLease":
        """Take over the training of a run from the process that has it, if any."""
        holder = _name_trainer(folder)
        with suppress(NotFound):
            last = (await store.latest(TRAINER)).value
            if last != holder:
                progress(f"note: took over the run {store.run!r} from the trainer {last}")
        return cls(store, await store.publish(TRAINER, holder))

    @staticmethod
    async def was_held_in(folder: Path, store: Store) -> bool:
        """Whether the last trainer of the run used this folder."""
        try:
            return (await store.latest(TRAINER)).value == _name_trainer(folder)
        except NotFound:
            return False

    async def commit(
        self,
        record: StepRecord,
        *,
        advantages: Mapping[GenerationId, float] = NO_ADVANTAGES,
        epoch: int | None = None,
    ) -> None:
        epoch = self.epoch if epoch is None else epoch
        await self._store.commit(record, advantages=advantages, epoch=epoch)

    async def steps(self, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        return await self._store.steps(after=after, limit=limit)

    async def advantages(self, step: int) -> dict[GenerationId, float]:
        return await self._store.advantages(step)


def _name_trainer(folder: Path) -> str:
    return f"{platform.node()}:{folder.absolute()}"


class TrainerWeights(Protocol):
    """Weights that a trainer updates and engines of other processes load."""

    @property
    def revision(self) -> int:
        """Number of updates; never decreases."""
        ...

    async def export_weights(self, file: Path) -> str:
        """Export the current weights, to this file if one is needed; returns what engines load."""
        ...


@dataclass(frozen=True, slots=True)
class Publication:
    """The place of published weights of a run, for engines that load a copy."""

    resources: Resources
    folder: Path
    epoch: int | None = None
    """Of the trainer's lease, where other trainers share the store."""

    async def publish_base(self, config: RunConfig, model: Path, name: str) -> None:
        """Publish a policy that is the model itself, unless it is published."""
        value = describe_policy(config, model, 0, "").model_dump(mode="json")
        resource = name_policy_resource(name)
        with suppress(NotFound):
            if (await self.resources.latest(resource)).value == value:
                return
        await self.resources.publish(resource, value, epoch=self.epoch)


class PublishingTrainer(TrainingBackend):
    """Trainer for engines with their own copy of the weights: publishes them through the store."""

    def __init__(
        self,
        trainer: TrainingBackend,
        policy: TrainerWeights,
        config: RunConfig,
        model: Path,
        publication: Publication,
        name: str = "",
    ) -> None:
        """`name` is that of the policy, if it is one of several."""
        self._trainer = trainer
        self._policy = policy
        self._config = config
        self._model = model
        self._resources = publication.resources
        self._resource = name_policy_resource(name)
        self._folder = publication.folder.absolute() / name
        self._epoch = publication.epoch
        self._published: int | None = None
        """Revision of the weights published last."""

    async def publish(self) -> int:
        version = await self._trainer.publish()
        if self._published == self._policy.revision:
            return version
        last = await self._read_last()
        # After a kill, engines that loaded this version have the same weights: between their
        # publication and the commit of their step nothing is sampled.
        if not (self._published is None and last and self._still_serves(last, version)):
            await self._publish(version, last)
        self._published = self._policy.revision
        return version

    async def _publish(self, version: int, last: PublishedPolicy | None) -> None:
        file = self._folder / f"{version:06d}-{secrets.token_hex(4)}.safetensors"
        weights = await self._policy.export_weights(file)
        policy = describe_policy(self._config, self._model, version, weights)
        number = await self._resources.publish(
            self._resource, policy.model_dump(mode="json"), epoch=self._epoch
        )
        logger.info("%s published version=%d resource=%d", self._resource, version, number)
        # An engine may still read the previous file; if it is too late, it finds the newer one.
        for old in self._folder.glob("*"):
            if old != file and (last is None or old != Path(last.weights)):
                old.unlink(missing_ok=True)

    def _still_serves(self, last: PublishedPolicy, version: int) -> bool:
        same = describe_policy(self._config, self._model, version, last.weights)
        return last == same and Path(last.weights).is_file()

    async def _read_last(self) -> PublishedPolicy | None:
        try:
            return read_policy(await self._resources.latest(self._resource))
        except NotFound:
            return None

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        return await self._trainer.forward_backward(rows, loss)

    async def recompute_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        return await self._trainer.recompute_logprobs(rows)

    async def optim_step(self, adam: AdamStep) -> Metrics:
        return await self._trainer.optim_step(adam)

    def take_log_ratios(self) -> Mapping[GenerationId, Sequence[float]]:
        return self._trainer.take_log_ratios()

    async def snapshot(self) -> Callable[[Path], None]:
        return await self._trainer.snapshot()

    async def save(self, folder: Path) -> None:
        await self._trainer.save(folder)

    async def restore(self, folder: Path) -> None:
        await self._trainer.restore(folder)

    async def export(self, folder: Path) -> None:
        await self._trainer.export(folder)


class EngineWeights(Protocol):
    """Weights that an engine samples from, in this process or another."""

    @property
    def version(self) -> int:
        """Version of the weights."""
        ...

    async def load(self, published: PublishedPolicy) -> None:
        """Sample from these weights from now on. Raises EngineError if they cannot be loaded."""
        ...


class PolicyFollower:
    """Loads the policy a run publishes into an engine, as soon as an attempt needs it.

    An attempt is pinned to a publication when it is claimed, so a step that begins after one is
    sampled by those weights or newer ones, by any engine, without waiting for all engines.
    """

    def __init__(
        self,
        weights: EngineWeights,
        served: PublishedPolicy,
        resources: Resources,
        name: str = "",
    ) -> None:
        """`name` is that of the policy, if it is one of several."""
        self._weights = weights
        self._resource = name_policy_resource(name)
        self._served = served
        self.published: PublishedPolicy = served
        """The policy that is loaded."""
        self._resources = resources
        self._loaded_resource_version = 0
        """Resource version of the loaded weights."""
        self._looked_up = float("-inf")
        self._loading = anyio.Lock()

    async def prepare(self, attempt: Attempt) -> None:
        """Return once weights as new as the attempt's are loaded.

        Raises:
            EngineError: they cannot be loaded; a retry may succeed.
        """
        wanted = attempt.resources.get(self._resource)
        if self._is_due(wanted):
            with anyio.move_on_after(LOAD_TIMEOUT_S) as scope:
                async with self._loading:
                    if self._is_due(wanted):
                        await self.load_newest()
            if scope.cancelled_caught:
                raise EngineError(f"loading version {wanted} of the policy timed out: try again")

    def _is_due(self, wanted: int | None) -> bool:
        if wanted is None:
            return anyio.current_time() >= self._looked_up + NEWEST_TTL_S
        return wanted > self._loaded_resource_version

    async def load_newest(self) -> None:
        """Load the newest published policy, if there is any."""
        while True:
            self._looked_up = anyio.current_time()
            try:
                newest = await self._resources.latest(self._resource)
            except NotFound:
                return
            if newest.version == self._loaded_resource_version:
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
                if (await self._resources.latest(self._resource)).version == newest.version:
                    raise
                continue  # a newer policy was published, and the file of this one deleted
            self._loaded_resource_version, self.published = newest.version, published
            number = newest.version
            logger.info(
                "%s loaded version=%d resource=%d", self._resource, published.version, number
            )
