"""The model in this process as what samples for a gateway."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio import to_thread

from whet.app.published import PublishedPolicy, ServedPolicy
from whet.app.sampler import Sampler, speaker
from whet.config import RunConfig
from whet.engines.grammar import Grammars
from whet.engines.local import LocalEngine
from whet.errors import EngineError
from whet.policies.local import LocalPolicy

SMALL_MODEL = 20_000_000
"""Parameters up to which one thread samples fastest."""


@asynccontextmanager
async def local_sampler(policy: LocalPolicy, config: RunConfig) -> AsyncGenerator[Sampler]:
    """The engine of a policy in this process."""
    renderer = speaker(policy.folder, config)
    engine = LocalEngine(
        policy,
        config.engine,
        renderer.template.decode,
        grammars=Grammars(policy.folder, renderer.stop_ids),
        threads=sampler_threads(policy),
    )
    try:
        yield Sampler(engine, engine.context_length, renderer, LocalWeights(policy))
    finally:
        await engine.close()


class LocalWeights(ServedPolicy):
    """A policy of this process that takes over what a trainer elsewhere publishes."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy

    @property
    def version(self) -> int:
        return self._policy.version

    async def load(self, published: PublishedPolicy) -> None:
        if not published.weights:
            if self._policy.edition:
                raise EngineError("the run went back to its first weights: restart `whet serve`")
            return
        # Shielded: a thread that changes weights must not be left behind with the lock let go.
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(
                self._policy.load_weights, Path(published.weights), published.version
            )


def sampler_threads(policy: LocalPolicy) -> int:
    """A small model gains nothing from more threads, and loses much where agents share cores."""
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    return 1 if size < SMALL_MODEL else os.cpu_count() or 1
