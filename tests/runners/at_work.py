"""A runner at a store, for as long as it takes to end some rollouts."""

from collections.abc import Mapping, Sequence

import anyio
from pydantic import JsonValue

from whet.config import RunnerConfig
from whet.runners.agent import Agent
from whet.runners.collect import QueueCollector
from whet.runners.gateways import OwnGateway
from whet.runners.hooks import Hooks
from whet.runners.local import LocalRunner
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Endpoint, Group, Mode, Rollout


def endpoint(attempt: Attempt) -> Endpoint:
    return Endpoint(base_url=f"http://nowhere/{attempt.id}", api_key=f"key-{attempt.id}", model="p")


async def run(
    agent: Agent,
    tasks: Sequence[JsonValue],
    store: SQLiteStore,
    *,
    timeout_s: float = 30,
    tries: int = 1,
    mode: Mode = Mode.TRAIN,
    resources: Mapping[str, JsonValue] | None = None,
    hooks: Sequence[Hooks] = (),
    prefix: str = "r",
    **config: int | str,
) -> list[Group]:
    """The groups that come of these tasks, one rollout each, called r0, r1 and so on."""
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
    runner = LocalRunner(
        agent,
        RunnerConfig.model_validate(config),
        store=store,
        gateways=OwnGateway(endpoint),
        hooks=hooks,
    )
    collector = QueueCollector(
        queue=store, log=store, resources=dict.fromkeys(resources or {}, "latest")
    )
    with anyio.fail_after(90):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            groups = await collector.collect(rollouts)
            tg.cancel_scope.cancel()
    return groups


async def reward_of(agent: Agent, store: SQLiteStore, **settings: object) -> float:
    """What the one rollout of an agent earned."""
    groups = await run(agent, ["t"], store, **settings)  # pyright: ignore[reportArgumentType]
    assert groups != [[]], await store.failures(["r0"])
    return groups[0][0].reward


async def why(agent: Agent, store: SQLiteStore, **settings: object) -> str:
    """Why the one rollout of an agent failed."""
    groups = await run(agent, ["t"], store, **settings)  # pyright: ignore[reportArgumentType]
    assert groups == [[]]
    return (await store.failures(["r0"]))["r0"]
