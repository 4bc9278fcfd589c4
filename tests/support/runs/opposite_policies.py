"""A run whose two policies learn opposite tasks, is killed and goes on; and what it must show."""

import hashlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from support.runs.processes import Command
from whet.algorithms import build_algorithm
from whet.app.run_folder import RunFolder
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.protocols import TrainingBackend
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.training.learners import select_calls, select_metrics
from whet.training.step import StepBatch, Stopwatch, update_policy
from whet.types import Group, StepRecord

TRAINED: tuple[str, ...] = ("digits", "letters")
AGENT = """
import httpx

async def ask(llm, text, **settings):
    async with httpx.AsyncClient(timeout=300, verify=False) as client:
        reply = await client.post(
            f"{llm.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {llm.api_key}"},
            json={"model": llm.model, "messages": [{"role": "user", "content": text}], **settings},
        )
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"] or ""

async def solve(task, llms, rollout):
    await ask(llms["fixed"], task["question"], max_tokens=2)
    text = await ask(llms[task["role"]], task["question"], max_tokens=12)
    digits = sum(character.isdigit() for character in text) / max(1, len(text))
    reward = digits if task["role"] == "digits" else 1 - digits
    # Without a place to learn much, a difference that does not depend on what is sampled.
    return reward + SPREAD * (int(rollout.id[-1]) % 2)
"""
NOTHING: Mapping[str, str] = {}
CONFIG = """
model = "tiny"
steps = {steps}
adam.lr = 3e-3
evaluation.samples = 0
{settings}
[policies.digits]
[policies.letters]
adam.lr = 2e-3
algorithm.name = "rloo"
[policies.fixed]
frozen = true
"""


def train_through_a_kill(
    tmp_path: Path,
    steps: int,
    settings: str = "tasks_per_step = 4",
    *,
    kill_after: int = 3,
    spread: float = 0.0,
    environment: Mapping[str, str] = NOTHING,
) -> RunFolder:
    """Train with further settings, kill the run in the middle, and let it go on to its end."""
    (tmp_path / "team.py").write_text(AGENT.replace("SPREAD", str(spread)))
    (tmp_path / "team.toml").write_text(CONFIG.format(steps=steps, settings=settings))
    tasks = [
        {"role": role, "question": f"What is {number} + {number + 1}?"}
        for number in range(8)
        for role in TRAINED
    ]
    for name, some in {"tasks": tasks, "held_out": tasks[:8]}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    inputs = ["team.py:solve", "--tasks", "tasks.jsonl", "--held-out", "held_out.jsonl"]
    begun = [*inputs, "--config", "team.toml", "--run", "team"]
    first = Command(tmp_path, "train", *begun, **environment)
    try:
        first.hears(f"   {kill_after}/{steps} ", timeout=900)
    finally:
        first.process.send_signal(signal.SIGKILL)
        first.ends()
    second = Command(tmp_path, "train", *inputs, "--resume", "team", **environment)
    assert second.ends(timeout=1200) == 0, second.output
    return RunFolder(tmp_path / ".whet" / "runs" / "team")


def check_learned(folder: RunFolder) -> None:
    """Check that both tasks were learned, and that each row was trained by its policy alone."""
    check_scores(folder)
    anyio.run(check_records, folder)
    for name in TRAINED:
        assert (folder.model / name / "adapter_config.json").is_file()
        replayed = anyio.run(replay_weights, folder, name)
        assert replayed == digest(max(folder.checkpoints.iterdir()) / name)
    assert not (folder.model / "fixed").exists()


def check_scores(folder: RunFolder) -> None:
    report = json.loads(folder.report.read_text())
    # One policy would answer both roles alike: 0.5, whatever it answers.
    assert report["before"]["greedy"] == pytest.approx(0.5)
    assert report["after"]["greedy"] > 0.6


async def check_records(folder: RunFolder) -> None:
    """Every call has its policy; the frozen one is at its first version and has no credit."""
    async with SQLiteStore(folder.store) as store:
        versions = dict.fromkeys(TRAINED, 0)
        for record in await store.steps():
            credited = set(await store.advantages(record.step))
            for trajectory in await store.trajectories(record.consumed):
                fixed, other = trajectory.calls
                assert (fixed.origin.policy, fixed.origin.model) == ("fixed", "fixed")
                assert {v for g in fixed.generations for v in g.versions} == {0}
                assert fixed.generation_id(0) not in credited
                role = trajectory.attempt.rollout.task
                assert isinstance(role, dict)
                assert other.origin.policy == role["role"]
                sampled_by = {v for g in other.generations for v in g.versions}
                assert sampled_by == {versions[str(role["role"])]}, "of its own weights"
            versions = {name: round(record.metrics[f"{name}/version"]) for name in TRAINED}


async def replay(folder: RunFolder, policy: str, trainer: TrainingBackend) -> None:
    """Train a policy alone, on its own calls, as the run did."""
    config = folder.read_config().for_policy(policy)
    algorithm = build_algorithm(config)
    async with SQLiteStore(folder.store) as store:
        done: list[StepRecord] = []
        for record in await store.steps():
            found = await store.trajectories(record.consumed)
            names = dict.fromkeys(t.attempt.rollout.group for t in found)
            by_group = [[t for t in found if t.attempt.rollout.group == n] for n in names]
            groups: list[Group] = [own for g in by_group if (own := select_calls(g, policy))]
            rollouts = tuple(t.attempt.rollout for group in groups for t in group)
            credits = tuple(await algorithm.credit(groups, done))
            batch = StepBatch(rollouts, tuple(groups), credits, ())
            if groups:
                metrics = await update_policy(batch, done, config, Stopwatch(), trainer)
                assert metrics["unproven_generations"] == 0
            done += select_metrics([record], policy)
            assert await trainer.publish() == done[-1].version


async def replay_weights(folder: RunFolder, policy: str) -> str:
    """Digest of the weights that a run of this policy alone has, trained in this process."""
    config = folder.read_config().for_policy(policy)
    assert config.trainer.kind == "local"
    weights = LocalPolicy(
        resolve_model(config.model), config.trainer, device="cpu", seed=config.seed
    )
    trainer = LocalTrainer(weights, threads=os.cpu_count())
    await replay(folder, policy, trainer)
    saved = folder.path / "replayed" / policy
    await trainer.save(saved)
    return digest(saved)


def digest(checkpoint: Path) -> str:
    files = [checkpoint / name for name in ("weights.safetensors", "optimizer.safetensors")]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files)).hexdigest()
