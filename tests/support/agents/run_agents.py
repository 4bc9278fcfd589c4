"""Run an agent on a few tasks at a store, and read the outcome."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from whet.config import RunnerConfig
from whet.runners.agent import Agent
from whet.runners.collector import QueueCollector
from whet.runners.endpoints import Connection, Endpoints
from whet.runners.hooks import Hooks
from whet.runners.runner import Runner
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Endpoint, Group, Mode, Rollout


def endpoint(attempt: Attempt) -> Endpoint:
    return Endpoint(base_url=f"http://nowhere/{attempt.id}", api_key=f"key-{attempt.id}", model="p")


@dataclass(frozen=True, slots=True)
class FixedEndpoint(Endpoints):
    """Endpoints by a function, as of a gateway that lives as long as the runner."""

    build: Callable[[Attempt], Endpoint]

    async def wait_ready(self) -> None:
        pass

    def connect(self, attempt: Attempt) -> Connection:
        return Connection(self.build(attempt))


async def run(
    agent: Agent,
    tasks: Sequence[Any],
    store: SQLiteStore,
    *,
    timeout_s: float = 30,
    tries: int = 1,
    mode: Mode = Mode.TRAIN,
    resources: Mapping[str, Any] | None = None,
    hooks: Sequence[Hooks] = (),
    prefix: str = "r",
    **config: int | str,
) -> list[Group]:
    """Run the agent on the tasks, one rollout each, named r0, r1 and so on; returns the groups."""
    for name, value in (resources or {}).items():
        await store.publish(name, value)
    rollouts = [
        Rollout(
            id=f"{prefix}{i}",
            group=f"{prefix}{i}",
            task=task,
            mode=mode,
            timeout_s=timeout_s,
            max_attempts=tries,
        )
        for i, task in enumerate(tasks)
    ]
    runner = Runner(
        agent,
        RunnerConfig.model_validate(config),
        store=store,
        endpoints=FixedEndpoint(endpoint),
        hooks=hooks,
    )
    collector = QueueCollector(
        queue=store, log=store, resources=dict.fromkeys(resources or {}, "latest")
    )
    groups: list[Group] = []
    with anyio.fail_after(90):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            groups = await collector.collect(rollouts)
            tg.cancel_scope.cancel()
    return groups


async def get_reward(agent: Agent, store: SQLiteStore, **settings: object) -> float:
    """Run one rollout of an agent and return its reward."""
    groups = await run(agent, ["t"], store, **settings)  # pyright: ignore[reportArgumentType]
    assert groups != [[]], await store.failures(["r0"])
    return groups[0][0].reward


async def get_failure(agent: Agent, store: SQLiteStore, **settings: object) -> str:
    """Run one rollout of an agent that fails and return the reason."""
    groups = await run(agent, ["t"], store, **settings)  # pyright: ignore[reportArgumentType]
    assert groups == [[]]
    return (await store.failures(["r0"]))["r0"]
