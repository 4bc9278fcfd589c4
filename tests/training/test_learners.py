"""Several policies: credit, rows and updates of each from its own calls alone."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from pydantic import JsonValue

from support.store.trajectories import Conversation, generation
from whet.algorithms import build_algorithm
from whet.config import LocalTrainerConfig, RunConfig, resolve
from whet.errors import ConfigError
from whet.protocols import Collector
from whet.store.sqlite import SQLiteStore
from whet.trainers.fake import FakeTrainer
from whet.trainers.policy_set import PolicyTrainers
from whet.training import async_loop, loop
from whet.training.checkpoints import restore_steps
from whet.training.learners import (
    Learner,
    PolicyAlgorithm,
    select_calls,
    select_metrics,
    update_policies,
)
from whet.types import (
    Call,
    Group,
    Origin,
    Outcome,
    Reward,
    Rollout,
    StepRecord,
    Target,
    Trajectory,
)

pytestmark = pytest.mark.anyio

POLICIES: dict[str, JsonValue] = {
    "planner": {},
    "worker": {"algorithm": {"name": "rloo"}, "adam": {"lr": 1e-3}},
    "critic": {"frozen": True},
}
NAMES = tuple(POLICIES)


def config_of(**values: JsonValue) -> RunConfig:
    return resolve(
        {"steps": 3, "tasks_per_step": 2, "group_size": 3, "policies": POLICIES, **values}
    )


def calls_of(rollout: str, group: str, policies: Sequence[str], sampled: int = 0) -> list[Call]:
    """A call of each of these policies, in one conversation with different answers."""
    talk = Conversation(rollout, group)
    parent = None
    for number in range(len(policies)):
        [parent] = talk.call([1, number], generation([3, sampled]), parent=parent)
    return [
        call.model_copy(update={"origin": Origin(model=policy, policy=policy)})
        for call, policy in zip(talk.calls, policies, strict=True)
    ]


def trajectory(
    rollout: str, policies: Sequence[str], reward: float, rewards: Sequence[Reward] = ()
) -> Trajectory:
    calls = tuple(calls_of(rollout, "g", policies))
    attempt = Conversation(rollout, "g").attempt
    return Trajectory(attempt=attempt, calls=calls, rewards=tuple(rewards), reward=reward)


def learners_of(config: RunConfig) -> list[Learner]:
    found: list[Learner] = []
    for name in config.trained_policies:
        own = config.for_policy(name)
        found.append(Learner(name, own, build_algorithm(own), FakeTrainer()))
    return found


async def test_each_policy_is_compared_over_the_rollouts_it_took_part_in() -> None:
    algorithm = PolicyAlgorithm(learners_of(config_of()))
    group = [
        trajectory("a", ["planner", "worker"], 1.0),
        trajectory("b", ["planner", "worker"], 0.0),
        trajectory("c", ["planner", "critic"], 0.5),
    ]
    credits = await algorithm.credit([group], [])
    found = {c.trajectory.attempt.rollout.id: list(c.advantages.values()) for c in credits}
    # The planner's baseline is the mean of three (GRPO), the worker's that of the other (RLOO).
    assert found == {"a": [0.5, 1.0], "b": [-0.5, -1.0], "c": [0.0]}
    assert [len(c.trajectory.calls) for c in credits] == [2, 2, 2]


async def test_a_reward_for_an_agent_or_a_call_is_read_by_its_policy_alone() -> None:
    config = config_of(algorithm={"credit": "turn"})
    named = trajectory("a", ["planner", "worker"], 0.0)
    worker = named.calls[1]
    rewards = [
        Reward(value=2.0, target=Target(call=worker.id)),
        Reward(value=5.0, target=Target(agent="nobody")),
        Reward(value=1.0, target=Target(turn=0)),
    ]
    group = [trajectory("a", ["planner", "worker"], 0.0, rewards)]
    [planner] = select_calls(group, "planner")
    assert [r.value for r in planner.rewards] == [1.0]
    [own] = select_calls(group, "worker")
    assert [r.value for r in own.rewards] == [2.0, 1.0]
    assert select_calls(group, "critic") == []
    other = [*group, trajectory("b", ["planner", "worker"], 0.0)]
    credits = await PolicyAlgorithm(learners_of(config)).credit([other], [])
    first = credits[0].advantages
    assert first[worker.generation_id(0)] == 3.0
    assert first[named.calls[0].generation_id(0)] == 0.5


async def test_credit_for_the_call_of_another_policy_is_an_error() -> None:
    class Greedy:
        """Credits whatever it is given, and one more."""

        async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[object]:
            [mine] = groups[0]
            return [type(whole)(mine, dict.fromkeys(group[0].generation_ids(), 1.0))]

    config = config_of()
    group = [trajectory("a", ["planner", "worker"], 1.0)]
    [whole] = await PolicyAlgorithm(learners_of(config_of(algorithm={"name": "positive"}))).credit(
        [group], []
    )
    learner = Learner("planner", config, Greedy(), FakeTrainer())  # pyright: ignore
    with pytest.raises(ConfigError, match="which is not one of its generations"):
        await PolicyAlgorithm([learner]).credit([group], [])


def test_a_policy_reads_its_own_version_and_metrics_from_the_steps() -> None:
    record = StepRecord(
        step=0,
        version=5,
        checkpoint="step-000000",
        consumed=("a",),
        metrics={"reward": 0.1, "planner/reward": 0.7, "planner/version": 2.0, "worker/rows": 1.0},
    )
    [own] = select_metrics([record], "planner")
    assert (own.version, own.metrics) == (2, {"reward": 0.7, "version": 2.0})


class ScriptedCollector(Collector):
    """Runs rollouts through the store; the agent of odd rollouts asks the planner alone."""

    def __init__(self, store: SQLiteStore, policies: Sequence[str] = NAMES) -> None:
        self._store = store
        self._policies = policies
        self.ran = 0

    async def begin(self, rollouts: Sequence[Rollout]) -> None:
        await self._store.enqueue(rollouts)

    async def wait(self, rollouts: Sequence[str]) -> None:
        await self._store.wait(rollouts)

    async def collect(self, rollouts: Sequence[Rollout]) -> list[Group]:
        await self.begin(rollouts)
        while attempt := await self._store.claim("w", lease_s=60, wait_s=0):
            self.ran += 1
            rollout = attempt.rollout
            policies = self._policies[:1] if rollout.task == 1 else self._policies
            for call in calls_of(rollout.id, rollout.group, policies, self.ran % 100):
                await self._store.append(call.model_copy(update={"attempt": attempt.id}))
            await self._store.finish(attempt.id, Outcome(reward=float(rollout.task == 0)))
        found = await self._store.trajectories([rollout.id for rollout in rollouts])
        names = list(dict.fromkeys(rollout.group for rollout in rollouts))
        return [[t for t in found if t.attempt.rollout.group == name] for name in names]


def plan(group: int) -> list[Rollout]:
    return [
        Rollout(id=f"g{group:02d}-{index}", task=index, group=f"g{group:02d}") for index in range(3)
    ]


async def run(
    store: SQLiteStore, folder: Path, config: RunConfig, policies: Sequence[str] = NAMES
) -> tuple[list[StepRecord], dict[str, FakeTrainer]]:
    """Run the steps that are left, with new trainers, as a process that is started again."""
    learners = learners_of(config)
    trainers = PolicyTrainers({each.name: each.trainer for each in learners})
    collector = ScriptedCollector(store, policies)
    algorithm, update = PolicyAlgorithm(learners), partial(update_policies, learners)
    parts = {"collector": collector, "algorithm": algorithm, "trainer": trainers, "log": store}
    await restore_steps(plan, config, checkpoints=folder, update=update, **parts)  # pyright: ignore
    train = async_loop.train if config.loop.name == "overlapped" else loop.train
    steps = train(plan, config, checkpoints=folder, update=update, **parts)  # pyright: ignore
    records = [record async for record in steps]
    return records, {each.name: each.trainer for each in learners}  # pyright: ignore


@pytest.mark.parametrize("name", ["on_policy", "overlapped"])
async def test_every_row_is_trained_by_the_policy_that_sampled_it(
    tmp_path: Path, name: str
) -> None:
    config = config_of(loop={"name": name})
    async with SQLiteStore(tmp_path / "store.db") as store:
        records, trainers = await run(store, tmp_path / "checkpoints", config)
        rollouts = [id for record in records for id in record.consumed]
        owner = {
            id: call.origin.policy
            for t in await store.trajectories(rollouts)
            for call in t.calls
            for id in [call.generation_id(0)]
        }
    trained = {
        name: {id for ids in trainer.trained for id in ids} for name, trainer in trainers.items()
    }
    assert {name: {owner[id] for id in ids} for name, ids in trained.items()} == {  # pyright: ignore
        "planner": {"planner"},
        "worker": {"worker"},
    }
    # Three rollouts of a group are compared for the planner, two for the worker.
    metrics = records[-1].metrics
    assert (metrics["planner/rows"], metrics["worker/rows"], metrics["rows"]) == (6, 4, 10)
    assert (metrics["trained_rollouts"], metrics["rollouts"], metrics["calls"]) == (6, 6, 14)
    assert metrics["planner/version"] == metrics["worker/version"] == 3
    assert records[-1].version == 6
    assert not any(key.startswith("critic/") for key in metrics)


async def test_a_checkpoint_has_every_policy_and_a_missing_one_is_repeated_for_each(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    async with SQLiteStore(tmp_path / "store.db") as store:
        await run(store, folder, config_of(steps=2))
        assert sorted(p.name for p in (folder / "step-000001").iterdir()) == ["planner", "worker"]
        (folder / "step-000001").rename(tmp_path / "lost")
        _, whole = await run(store, folder, config_of(steps=4))
        assert (await store.steps())[-1].version == 8
        assert whole["planner"].version == whole["worker"].version == 4


async def test_a_policy_that_nobody_calls_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with SQLiteStore(tmp_path / "store.db") as store:
            records, trainers = await run(
                store, tmp_path / "checkpoints", config_of(steps=1), ["planner"]
            )
    assert "no call of step 1 was for policy 'worker'" in caplog.text
    assert records[0].metrics["worker/rows"] == 0
    assert trainers["worker"].version == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policies": {"a b": {}}}, "invalid model name 'a b' of a policy"),
        ({"policies": {"policy": {}}}, "the model name 'policy' is taken"),
        ({"policies": {"a": {"models": ["b"]}, "b": {}}}, "the model name 'b' is taken"),
        (
            {"policies": {"a": {}}, "engine": {"kind": "sglang", "urls": ["http://h"]}},
            "engine.kind 'sglang' supports only one",
        ),
        ({"policies": {"a": {}}, "trainer": {"kind": "verl"}}, "trainer.kind 'verl' supports only"),
        (
            {
                "policies": {"a": {}, "b": {"trainer": {"weights": "full"}}},
                "engine": {"kind": "vllm"},
            },
            "policy 'b': vLLM serves several policies as LoRA adapters",
        ),
        ({"policies": {"a": {}}, "runner": {"ray": "auto"}}, "runner.ray supports only one"),
        ({"policies": {"a": {}}, "trainer": {"gpus": 2}}, "trainer.gpus is 2, but several"),
        ({"policies": {"a": {"trainer": {"gpus": 3}}}}, "policy 'a': trainer.gpus is 3"),
        ({"policies": {"a": {}}, "gateway": {"models": ["x"]}}, "use policies.NAME.models"),
        ({"policies": {"a": {"adam": {"lr": -1}}}}, "policy 'a': config key 'adam.lr'"),
        ({"policies": {"a": {"adam": {"rate": 1}}}}, "unknown config key 'adam.rate'"),
        ({"policies": {"a": {"rate": 1}}}, "unknown config key 'policies.a.rate'"),
        ({"policies": {"a": {"trainer": {"kind": "tinker"}}}}, "expected trainer.kind"),
        ({"policies": {"a": {"algorithm": {"oversample": 2}}}}, "set it for the run"),
        ({"policies": {"a": {"algorithm": {"name": "greedy"}}}}, "set it for the run"),
    ],
)
def test_settings_that_exclude_each_other_are_an_error_in_one_line(
    values: dict[str, JsonValue], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(values)
    assert "\n" not in str(caught.value)


def test_a_policy_has_the_settings_of_the_run_and_its_own_over_them() -> None:
    config = config_of(adam={"beta2": 0.5}, trainer={"lora_rank": 4})
    worker = config.for_policy("worker")
    assert (worker.adam.lr, worker.adam.beta2) == (1e-3, 0.5)
    assert worker.algorithm.name == "rloo"
    assert config.for_policy("planner").algorithm.name == "grpo"
    assert isinstance(worker.trainer, LocalTrainerConfig)
    assert worker.trainer.lora_rank == 4
    assert config.trained_policies == ("planner", "worker")
    assert RunConfig().trained_policies == ("",)
