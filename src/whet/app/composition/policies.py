"""Several policies of one run: their weights, trainers and samplers.

In this process, and at a server that samples from adapters, the base model is in memory once and
each policy that trains adapters has its own on it. At a Tinker service each is a model of its own.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from whet.app.composition.samplers import (
    Sampler,
    build_renderer,
    open_local_sampler,
    open_sampler,
    open_server_samplers,
    open_tinker_sampler,
)
from whet.app.composition.trainers import check_served, open_algorithm, open_local_trainer
from whet.app.composition.weight_sync import (
    PolicyFollower,
    Publication,
    PublishingTrainer,
    name_policy_resource,
    read_policy,
)
from whet.app.run_folder import RunFolder
from whet.config import LocalTrainerConfig, RunConfig, TinkerConfig
from whet.errors import ConfigError, requires_extra
from whet.gateway.templates.renderer import Renderer
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy, load_base
from whet.protocols import Algorithm, Store, TrainingBackend
from whet.trainers.policy_set import PolicyTrainers
from whet.training.learners import Learner, PolicyAlgorithm, update_policies
from whet.training.step import Update
from whet.types import Attempt

if TYPE_CHECKING:  # the client takes seconds to import
    from whet.models.tinker import TinkerPolicy

Progress = Callable[[str], None]
Prepare = Callable[[Attempt], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Policies:
    """The open policies of a run of several, and what trains those that are not frozen."""

    weights: "dict[str, LocalPolicy | TinkerPolicy]"
    """Of every policy, by name."""
    folders: dict[str, Path]
    """The model folder of every policy, for its tokenizer and chat template."""
    algorithm: PolicyAlgorithm
    trainer: PolicyTrainers
    update: Update

    async def close(self) -> None:
        """End the sessions of policies at a Tinker service."""
        for policy in self.weights.values():
            if not isinstance(policy, LocalPolicy):
                await policy.close()


async def open_policies(
    config: RunConfig,
    algorithm: Algorithm | None,
    publication: Publication | None,
    progress: Progress,
) -> Policies:
    """Load the policies of a config; `algorithm` replaces the one of the run.

    With a `publication` their weights are published there, those of frozen policies at once.
    """
    loader = _Loader()
    weights: dict[str, LocalPolicy | TinkerPolicy] = {}
    folders: dict[str, Path] = {}
    learners: list[Learner] = []
    for name, policy in config.policies.items():
        own = config.for_policy(name)
        folders[name] = folder = resolve_model(own.model, progress=progress)
        weights[name], trainer = await loader.open(folder, own, frozen=policy.frozen)
        if publication is not None:
            trainer = await _publish(publication, name, weights[name], trainer, own, folder)
        if policy.frozen:
            if trainer is not None:
                await trainer.publish()
            continue
        assert trainer is not None
        inherits = algorithm is not None and own.algorithm == config.algorithm
        chosen = algorithm if inherits else open_algorithm(own, folder, progress=progress)
        assert chosen is not None
        learners.append(Learner(name, own, chosen, trainer))
    if publication is not None:
        _check_one_base(config, folders)
    return Policies(
        weights,
        folders,
        PolicyAlgorithm(learners),
        PolicyTrainers({learner.name: learner.trainer for learner in learners}),
        partial(update_policies, learners),
    )


async def _publish(
    publication: Publication,
    name: str,
    weights: "LocalPolicy | TinkerPolicy",
    trainer: TrainingBackend | None,
    config: RunConfig,
    folder: Path,
) -> TrainingBackend | None:
    """The trainer of a policy that publishes its weights; the model itself is published at once."""
    assert isinstance(weights, LocalPolicy)
    check_served(weights, config)
    if trainer is None:
        await publication.publish_base(config, folder, name)
        return None
    return PublishingTrainer(trainer, weights, config, folder, publication, name)


def _check_one_base(config: RunConfig, folders: dict[str, Path]) -> None:
    """Raise ConfigError unless one server can have all policies as adapters on its model."""
    trainers = [config.for_policy(name).trainer for name in folders]
    precisions = {t.precision for t in trainers if isinstance(t, LocalTrainerConfig)}
    if len({folder.resolve() for folder in folders.values()}) > 1 or len(precisions) > 1:
        raise ConfigError(
            "vLLM serves several policies as LoRA adapters of one base model: give all of them the "
            "same model and trainer.precision, or set engine.kind to local"
        )


class _Loader:
    """Loads policies, each base model once."""

    def __init__(self) -> None:
        self._bases: dict[tuple[Path, str], LocalPolicy] = {}

    async def open(
        self, folder: Path, config: RunConfig, *, frozen: bool
    ) -> "tuple[LocalPolicy | TinkerPolicy, TrainingBackend | None]":
        """A policy and its trainer; that of a frozen one only has the weights it starts from."""
        if isinstance(config.trainer, TinkerConfig):
            return await self._open_tinker(config, frozen=frozen)
        if frozen and config.initial_weights is None:
            return self._load_base(folder, config), None
        policy = self._load_policy(folder, config)
        return policy, await open_local_trainer(policy, config)

    async def _open_tinker(
        self, config: RunConfig, *, frozen: bool
    ) -> "tuple[TinkerPolicy, TrainingBackend | None]":
        with requires_extra("trainer.kind 'tinker'", "tinker"):
            from whet.models.tinker import TinkerPolicy  # noqa: PLC0415 - only if needed
            from whet.trainers.tinker import TinkerTrainer  # noqa: PLC0415
        if frozen:
            policy = await TinkerPolicy.connect(config)
            await policy.sample_from("", 0)
            return policy, None
        policy = await TinkerPolicy.open(config)
        return policy, TinkerTrainer(policy)

    def _load_base(self, folder: Path, config: RunConfig) -> LocalPolicy:
        """A model as it is, for sampling and for adapters on it."""
        assert config.trainer.kind == "local"
        key = folder.resolve(), config.trainer.precision
        if key not in self._bases:
            self._bases[key] = load_base(folder, config.trainer, device=config.engine.device)
        return self._bases[key]

    def _load_policy(self, folder: Path, config: RunConfig) -> LocalPolicy:
        """A policy with adapters on its base, or with weights of its own."""
        assert config.trainer.kind == "local"
        base = self._load_base(folder, config) if config.trainer.weights == "lora" else None
        return LocalPolicy(
            folder, config.trainer, device=config.engine.device, seed=config.seed, base=base
        )


@asynccontextmanager
async def open_policy_samplers(
    policies: Policies, config: RunConfig
) -> AsyncGenerator[dict[str, Sampler]]:
    """Sample from each policy by an engine of its own; those of one base share its template."""
    renderers: dict[Path, Renderer] = {}
    samplers: dict[str, Sampler] = {}
    async with AsyncExitStack() as stack:
        for name, policy in policies.weights.items():
            folder = policies.folders[name]
            if folder not in renderers:
                renderers[folder] = build_renderer(folder, config)
            if isinstance(policy, LocalPolicy):
                opened = open_local_sampler(policy, config, renderers[folder])
            else:
                opened = open_tinker_sampler(policy, renderers[folder])
            samplers[name] = await stack.enter_async_context(opened)
        yield samplers


@asynccontextmanager
async def open_followers(
    model: Path, folder: RunFolder, store: Store, training_gpus: int, progress: Progress
) -> AsyncGenerator[tuple[dict[str, Sampler], Prepare]]:
    """Sample from what the trainer publishes; every policy that an attempt is pinned to is loaded
    before its first call."""
    config = folder.read_config()
    published = {
        name: read_policy(await store.latest(name_policy_resource(name)))
        for name in config.policies or ("",)
    }
    async with AsyncExitStack() as stack:
        if config.policies:
            base = resolve_model(next(iter(published.values())).model)
            several = open_server_samplers(
                base,
                published,
                config,
                folder=folder.path,
                training_gpus=training_gpus,
                progress=progress,
            )
            samplers = await stack.enter_async_context(several)
        else:
            one = open_sampler(
                model,
                published[""],
                config,
                folder=folder.path,
                training_gpus=training_gpus,
                progress=progress,
            )
            samplers = {"": await stack.enter_async_context(one)}
        followers = [
            PolicyFollower(sampler.weights, published[name], store, name)
            for name, sampler in samplers.items()
        ]
        for follower in followers:
            await follower.load_newest()

        async def prepare(attempt: Attempt) -> None:
            for follower in followers:
                await follower.prepare(attempt)

        yield samplers, prepare
