"""Checks that a finished run must pass, however often it was killed on the way."""

import sqlite3
from collections.abc import Sequence

from anyio import fail_after
from pydantic import JsonValue

from whet.algorithms import build_algorithm
from whet.app.evaluation.trials import plan_trials
from whet.app.inputs import plan_rollouts
from whet.app.run_folder import RunFolder
from whet.config import RunConfig
from whet.store.sqlite import SQLiteStore
from whet.training.rows import build_rows
from whet.types import Group, StepRecord, Trajectory


async def audit(
    folder: RunFolder, tasks: Sequence[JsonValue], held_out: Sequence[JsonValue]
) -> list[StepRecord]:
    """Check the store of a finished run against its plan; the steps it found."""
    config = folder.read_config()
    plan = plan_rollouts(tasks, config)
    async with SQLiteStore(folder.store) as store:
        steps = await store.steps()
        assert [step.step for step in steps] == list(range(config.steps))
        staleness = config.loop.max_staleness if config.loop.name == "overlapped" else 0
        updates = config.loop.mini_batches * config.loop.epochs
        version = 0
        planned: list[str] = []
        for step in steps:
            first = step.step * config.tasks_per_step
            groups = range(first, first + config.tasks_per_step)
            ids = [rollout.id for group in groups for rollout in plan(group)]
            planned += ids
            assert list(step.consumed) == ids, "a step consumed other rollouts than planned"
            with fail_after(5):
                await store.wait(ids)  # returns at once: all of them are terminal
            trajectories = await store.trajectories(ids)
            fresh = {version - age for age in range(staleness * updates + 1)}
            assert sampled_by(trajectories) <= fresh, "sampled by weights of another step"
            await check_rows(step, trajectories, config)
            version = step.version
        for when, expected in (("before", 0), (f"step-{config.steps:06d}", version)):
            ids = [trial.rollout.id for trial in plan_trials(when, held_out, config)]
            assert sampled_by(await store.trajectories(ids)) == {expected}
    check_tables(folder, planned)
    return steps


def sampled_by(trajectories: Sequence[Trajectory]) -> set[int]:
    """The versions of the policy that sampled in these trajectories."""
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    return {v for call in calls for generation in call.generations for v in generation.versions}


async def check_rows(
    step: StepRecord, trajectories: Sequence[Trajectory], config: RunConfig
) -> None:
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.attempt.rollout.group, []).append(trajectory)
    ordered: list[Group] = list(groups.values())
    built = build_rows(await build_algorithm(config).credit(ordered, []))
    assert built.unproven == ()
    assert step.metrics["unproven_generations"] == 0
    assert len(built.rows) == step.metrics["rows"]
    trained = sum(row.trained_tokens for row in built.rows)
    assert trained * config.loop.epochs == step.metrics.get("trained_tokens", 0)


def check_tables(folder: RunFolder, planned: Sequence[str]) -> None:
    with sqlite3.connect(folder.store) as db:
        stored = dict(db.execute("SELECT id, status FROM rollout WHERE id LIKE 'train-%'"))
        consumed = [id for (id,) in db.execute("SELECT rollout FROM consumed")]
        running = db.execute("SELECT count(*) FROM attempt WHERE status = 'running'").fetchone()
    db.close()
    assert set(stored) == set(planned)
    assert set(stored.values()) <= {"succeeded", "failed"}
    assert sorted(consumed) == sorted(planned), "consumed exactly once"
    assert running == (0,)
