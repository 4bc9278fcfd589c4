"""Several policies of one run, in this process: their weights, trainers and samplers.

The base model is in memory once, and each policy that trains adapters has its own on it.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from whet.app.composition.samplers import Sampler, build_renderer, local_sampler
from whet.app.composition.trainers import open_algorithm, open_local_trainer
from whet.config import RunConfig
from whet.gateway.templates.renderer import Renderer
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy, load_base
from whet.protocols import Algorithm
from whet.trainers.policy_set import PolicyTrainers
from whet.training.learners import Learner, PolicyAlgorithm, update_policies
from whet.training.step import Update

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Policies:
    """The open policies of a run of several, and what trains those that are not frozen."""

    weights: dict[str, LocalPolicy]
    """Of every policy, by name."""
    algorithm: PolicyAlgorithm
    trainer: PolicyTrainers
    update: Update


async def open_policies(
    config: RunConfig, algorithm: Algorithm | None, progress: Progress
) -> Policies:
    """Load the policies of a config; `algorithm` replaces the one of the run."""
    loader = _Loader()
    weights: dict[str, LocalPolicy] = {}
    learners: list[Learner] = []
    for name, policy in config.policies.items():
        own = config.for_policy(name)
        folder = resolve_model(own.model, progress=progress)
        if policy.frozen and own.start is None:
            weights[name] = loader.load_base(folder, own)
            continue
        weights[name] = loader.load_policy(folder, own)
        trainer = await open_local_trainer(weights[name], own)
        if not policy.frozen:
            inherits = algorithm is not None and own.algorithm == config.algorithm
            chosen = algorithm if inherits else open_algorithm(own, folder, progress=progress)
            assert chosen is not None
            learners.append(Learner(name, own, chosen, trainer))
    return Policies(
        weights,
        PolicyAlgorithm(learners),
        PolicyTrainers({learner.name: learner.trainer for learner in learners}),
        partial(update_policies, learners),
    )


class _Loader:
    """Loads policies, each base model once."""

    def __init__(self) -> None:
        self._bases: dict[tuple[Path, str], LocalPolicy] = {}

    def load_base(self, folder: Path, config: RunConfig) -> LocalPolicy:
        """A model as it is, for sampling and for adapters on it."""
        assert config.trainer.kind == "local"
        key = folder.resolve(), config.trainer.precision
        if key not in self._bases:
            self._bases[key] = load_base(folder, config.trainer, device=config.engine.device)
        return self._bases[key]

    def load_policy(self, folder: Path, config: RunConfig) -> LocalPolicy:
        """A policy with adapters on its base, or with weights of its own."""
        assert config.trainer.kind == "local"
        base = self.load_base(folder, config) if config.trainer.weights == "lora" else None
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
            if policy.folder not in renderers:
                renderers[policy.folder] = build_renderer(policy.folder, config)
            opened = local_sampler(policy, config, renderers[policy.folder])
            samplers[name] = await stack.enter_async_context(opened)
        yield samplers
