"""A Tinker service as what trains and samples for a run, in one process or in two."""

from pathlib import Path

from whet.app.published import PublishedPolicy, ServedPolicy
from whet.app.sampler import Sampler, speaker
from whet.config import RunConfig
from whet.engines.tinker import TinkerEngine
from whet.policies.tinker import TinkerPolicy


async def tinker_sampler(model: Path, published: PublishedPolicy, config: RunConfig) -> Sampler:
    """What samples from the weights that a trainer elsewhere has at the service.

    Raises:
        ConfigError: the service cannot be had, or has no such model.
    """
    known = {"model": published.model, "trainer": published.trainer, "tinker": published.tinker}
    policy = await TinkerPolicy.join(config.model_copy(update=known))
    return sampler_of(policy, model, config)


def sampler_of(policy: TinkerPolicy, model: Path, config: RunConfig) -> Sampler:
    """What samples from a policy of this process."""
    renderer = speaker(model, config)
    engine = TinkerEngine(policy, renderer.template.decode)
    return Sampler(engine, engine.context_length, renderer, TinkerWeights(policy))


class TinkerWeights(ServedPolicy):
    """A sampler that takes over what a trainer elsewhere publishes, by its path at the service."""

    def __init__(self, policy: TinkerPolicy) -> None:
        self._policy = policy

    @property
    def version(self) -> int:
        return self._policy.served

    async def load(self, published: PublishedPolicy) -> None:
        await self._policy.sample_from(published.weights, published.version)
