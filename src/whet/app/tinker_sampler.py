"""A Tinker service as what trains and samples for a run."""

from pathlib import Path

from whet.app.published import PublishedPolicy, ServedPolicy
from whet.app.sampler import Sampler, speaker
from whet.config import RunConfig
from whet.engines.tinker import TinkerEngine
from whet.errors import EngineError
from whet.policies.tinker import TinkerPolicy
from whet.protocols import Trainer
from whet.trainers.tinker import TinkerTrainer


async def tinker_parts(model: Path, config: RunConfig) -> tuple[Sampler, Trainer]:
    """New adapters at the service, what samples from them and what trains them.

    Raises:
        ConfigError: the service cannot be had, or has no such model.
    """
    policy = await TinkerPolicy.open(config)
    renderer = speaker(model, config)
    engine = TinkerEngine(policy, renderer.template.decode)
    return Sampler(engine, engine.context_length, renderer, _Own(policy)), TinkerTrainer(policy)


class _Own(ServedPolicy):
    """The trainer's own policy: publishing is all it takes."""

    def __init__(self, policy: TinkerPolicy) -> None:
        self._policy = policy

    @property
    def version(self) -> int:
        return self._policy.served

    async def load(self, published: PublishedPolicy) -> None:
        raise EngineError("the weights of a Tinker service are published by its trainer")
