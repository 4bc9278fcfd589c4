"""Failed rollouts are left out, or counted with the reward of their kind of failure."""

from pathlib import Path

import pytest

from support.store.records import claim, failed, full_call, rollout
from whet.config import FailureRewardConfig
from whet.runners.collector import QueueCollector
from whet.store.sqlite import SQLiteStore
from whet.types import FailureKind, Outcome

pytestmark = pytest.mark.anyio

KINDS = (
    FailureKind.AGENT,
    FailureKind.TIMEOUT,
    FailureKind.CONTEXT_LENGTH,
    FailureKind.WORKER_LOST,
)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (FailureRewardConfig(), {"won": 1.0}),
        (
            FailureRewardConfig(agent=0.0, timeout=-1.0),
            {"agent": 0.0, "timeout": -1.0, "won": 1.0},
        ),
        (FailureRewardConfig(context_length=-0.5), {"context_length": -0.5, "won": 1.0}),
    ],
)
async def test_failures_count_with_the_reward_of_their_kind(
    tmp_path: Path, rewards: FailureRewardConfig, expected: dict[str, float]
) -> None:
    ids = [*KINDS, "silent", "won"]
    rollouts = [rollout(id_, max_attempts=1) for id_ in ids]
    async with SQLiteStore(tmp_path / "store.db") as store:
        await store.enqueue(rollouts)
        for id_ in ids:
            attempt = await claim(store)
            if id_ != "silent":  # no call: nothing that the model did made it fail
                await store.append(full_call(attempt.id))
            kind = FailureKind(id_) if id_ in KINDS else FailureKind.AGENT
            outcome = Outcome(reward=1.0) if id_ == "won" else failed(kind)
            await store.finish(attempt.id, outcome)
        collector = QueueCollector(queue=store, log=store, failure_reward=rewards)
        [group] = await collector.collect(rollouts)
    assert {t.attempt.rollout.id: t.reward for t in group} == expected
    assert {t.attempt.rollout.id for t in group if t.failure} == set(expected) - {"won"}
    assert all(t.calls for t in group)
