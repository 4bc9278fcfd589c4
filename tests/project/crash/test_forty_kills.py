"""Four processes train a model while each of them is killed ten times, and nothing is lost."""

import json
import os
import random
import re
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from pydantic import JsonValue

from support.runs.four_processes import RUN, Killer, four_processes
from whet.algorithms import build_algorithm
from whet.app.inputs import plan_rollouts
from whet.app.run_folder import RunFolder
from whet.config import LocalTrainerConfig
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.protocols import StepLog
from whet.runners.collector import QueueCollector
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.training import loop
from whet.types import (
    NO_ADVANTAGES,
    TERMINAL,
    AttemptId,
    Call,
    GenerationId,
    StepRecord,
    digest_tokens,
)

pytestmark = pytest.mark.slow

KILLS_EACH = 10
TASKS: list[JsonValue] = [f"say {word}" for word in ("one", "two", "three", "four", "five")]
SETTINGS: dict[str, JsonValue] = {
    "steps": 12,
    "tasks-per-step": 2,
    "group-size": 4,
    "runner.max-attempts": 10,
    "trainer.weights": "full",
}
SEED_VARIABLE = "WHET_KILL_SEED"


def test_a_run_whose_processes_are_killed_forty_times_loses_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get(SEED_VARIABLE, random.SystemRandom().randrange(10**6)))
    print(f"{SEED_VARIABLE}={seed}")  # noqa: T201 - to repeat a failure
    with four_processes(tmp_path, TASKS, SETTINGS) as processes:
        killer = Killer(processes, tmp_path, int(str(SETTINGS["steps"])), seed)
        killer.kill_each(KILLS_EACH)
        killer.let_finish()
    assert killer.killed == dict.fromkeys(("store", "serve", "runner", "train"), KILLS_EACH)
    folder = RunFolder(tmp_path / "whet" / "runs" / RUN)
    anyio.run(check, folder, tmp_path)


async def check(folder: RunFolder, journals: Path) -> None:
    async with SQLiteStore(folder.path.parent.parent / "store.db", run=RUN) as store:
        await check_rollouts(store, folder)
        await check_calls(store, journals)
        await check_weights(store, folder)


async def check_rollouts(store: SQLiteStore, folder: RunFolder) -> None:
    """All have ended, and each was trained in the step that was to train it, and in no other."""
    config = folder.read_config()
    plan = plan_rollouts(TASKS, config)
    steps = await store.steps()
    assert [step.step for step in steps] == list(range(config.steps))
    groups = range(config.steps * config.tasks_per_step)
    planned = [rollout.id for group in groups for rollout in plan(group)]
    assert [rollout for step in steps for rollout in step.consumed] == planned
    records = await store.rollouts(limit=10_000)
    assert [record.rollout.id for record in records] == planned
    assert {record.status for record in records} <= TERMINAL
    failures = await store.failures([record.rollout.id for record in records])
    assert failures == {}, "killing processes is no reason for a rollout to fail"
    for record in records:
        attempts = await store.attempts(record.rollout.id)
        ended = Counter(attempt.status.value for attempt in attempts)
        assert ended["succeeded"] == 1
        assert ended["running"] == 0
    assert all(step.metrics["unproven_generations"] == 0 for step in steps)


def noted(journals: Path) -> Generator[tuple[AttemptId, dict[str, Any]]]:  # Any: JSON
    """The answers that agents got. A kill may have torn the last line of a file."""
    for journal in journals.glob("journal-*.jsonl"):
        for line in journal.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                note = json.loads(line)
                found = re.search(r"/attempt/([^/]+)/v1", note["url"])
                assert found is not None
                yield AttemptId(found[1]), note["reply"]


async def check_calls(store: SQLiteStore, journals: Path) -> None:
    """Every answer an agent got is in the store, token for token."""
    answers = list(noted(journals))
    calls: dict[str, dict[str, Call]] = {}
    for attempt, reply in answers:
        if attempt not in calls:
            calls[attempt] = {call.id: call for call in await store.calls(attempt)}
        call = calls[attempt][reply["id"].removeprefix("chatcmpl-")]
        [choice] = reply["choices"]
        assert list(call.generations[0].tokens) == choice["token_ids"]
        prompt = reply["prompt_token_ids"]
        assert call.prompt_length == len(prompt)
        assert call.prompt_digest == digest_tokens(prompt).hexdigest()
    steps = await store.steps()
    assert len(answers) >= sum(step.metrics["calls"] for step in steps) > 0


class Steps(StepLog):
    """The steps of a replay, kept nowhere."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    async def commit(
        self,
        record: StepRecord,
        *,
        advantages: Mapping[GenerationId, float] = NO_ADVANTAGES,
        epoch: int | None = None,
    ) -> None:
        self.records.append(record)

    async def steps(self, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        return []

    async def advantages(self, step: int) -> dict[GenerationId, float]:
        return {}


async def check_weights(store: SQLiteStore, folder: RunFolder) -> None:
    """Training a fresh model on what the store has gives the weights of the last checkpoint."""
    config = folder.read_config()
    final = await store.steps()

    def trainer() -> tuple[LocalPolicy, LocalTrainer]:
        model = resolve_model(config.model)
        assert isinstance(config.trainer, LocalTrainerConfig)
        policy = LocalPolicy(model, config.trainer, device="cpu", seed=config.seed)
        return policy, LocalTrainer(policy, threads=os.cpu_count())

    restored, trained_before = trainer()
    await trained_before.restore(folder.checkpoints / final[-1].checkpoint)
    fresh, trains_again = trainer()
    replayed = Steps()
    records = loop.train(
        plan_rollouts(TASKS, config),
        config,
        checkpoints=folder.path / "replay",
        collector=QueueCollector(queue=store, log=store),
        algorithm=build_algorithm(config),
        trainer=trains_again,
        log=replayed,
    )
    async for _ in records:
        pass
    same = ("reward", "rows", "trained_tokens", "loss", "grad_norm")
    # A step whose groups give no signal trains nothing, and so says nothing of it.
    assert [[step.metrics.get(name) for name in same] for step in replayed.records] == [
        [step.metrics.get(name) for name in same] for step in final
    ]
    assert sum("trained_tokens" in step.metrics for step in final) > len(final) / 2
    weights = restored.get_trainable()
    for name, parameter in fresh.get_trainable().items():
        assert torch.equal(parameter, weights[name]), name
