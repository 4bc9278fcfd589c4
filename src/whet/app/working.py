"""Agents at work on a queue, and where they reach their model."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from anyio import create_task_group

from whet.app.signals import first_of
from whet.config import RunnerConfig
from whet.gateway import keys
from whet.runners.agent import Agent
from whet.runners.gateways import OwnGateway
from whet.runners.hooks import Hooks
from whet.runners.local import LocalRunner, Work
from whet.types import Attempt, Endpoint, Outcome


def endpoint_of(url: str, secret: bytes, model: str) -> Callable[[Attempt], Endpoint]:
    """Where an attempt reaches its model: path and key both name the attempt."""

    def endpoint(attempt: Attempt) -> Endpoint:
        path = f"/rollout/{attempt.rollout.id}/attempt/{attempt.id}/v1"
        return Endpoint(base_url=url + path, api_key=keys.mint(attempt.id, secret), model=model)

    return endpoint


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway at work."""

    url: str
    secret: bytes
    model: str

    def endpoint(self, attempt: Attempt) -> Endpoint:
        """Where an attempt reaches its model."""
        return endpoint_of(self.url, self.secret, self.model)(attempt)

    @property
    def own_endpoint(self) -> Endpoint:
        """For calls of no attempt, where the config allows them."""
        key = keys.mint(keys.ANY, self.secret)
        return Endpoint(base_url=f"{self.url}/v1", api_key=key, model=self.model)


@asynccontextmanager
async def agents_at_work(
    agent: Agent,
    config: RunnerConfig,
    store: Work,
    endpoint: Callable[[Attempt], Endpoint],
    on_outcome: Callable[[Attempt, Outcome], None],
    *,
    hooks: Sequence[Hooks] = (),
    note: Callable[[str], None] | None = None,
) -> AsyncGenerator[None]:
    """Claim and run rollouts until the block ends; a failure of either is raised as it is.

    `note` is told what would spoil training, where there is any.
    """
    runner = LocalRunner(
        agent,
        config,
        store=store,
        gateways=OwnGateway(endpoint),
        hooks=hooks,
        on_outcome=on_outcome,
        on_warning=note,
    )
    try:
        async with create_task_group() as tasks:
            tasks.start_soon(runner.run)
            yield
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        raise first_of(group) from group
