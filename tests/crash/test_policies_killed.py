"""Two adapters learn opposite tasks in one run, which is killed and goes on."""

import hashlib
import json
import os
import signal
from pathlib import Path

import anyio
import pytest

from support.processes import Command
from whet.algorithms import build_algorithm
from whet.app.run_folder import RunFolder
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.training.learners import select_calls, select_metrics
from whet.training.step import StepBatch, Stopwatch, update_policy
from whet.types import Group, StepRecord

pytestmark = pytest.mark.slow

STEPS = 10
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

async def solve(task, llms):
    await ask(llms["fixed"], task["question"], max_tokens=2)
    text = await ask(llms[task["role"]], task["question"], max_tokens=12)
    digits = sum(character.isdigit() for character in text) / max(1, len(text))
    return digits if task["role"] == "digits" else 1 - digits
"""
CONFIG = f"""
model = "tiny"
steps = {STEPS}
tasks_per_step = 4
group_size = 8
adam.lr = 3e-3
evaluation.samples = 0
[policies.digits]
[policies.letters]
adam.lr = 2e-3
algorithm.name = "rloo"
[policies.fixed]
frozen = true
"""


def test_opposite_tasks_are_learned_by_two_policies_through_a_kill(tmp_path: Path) -> None:
    (tmp_path / "team.py").write_text(AGENT)
    (tmp_path / "team.toml").write_text(CONFIG)
    tasks = [
        {"role": role, "question": f"What is {number} + {number + 1}?"}
        for number in range(8)
        for role in ("digits", "letters")
    ]
    for name in ("tasks", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    inputs = ["team.py:solve", "--tasks", "tasks.jsonl", "--held-out", "held_out.jsonl"]
    first = Command(tmp_path, "train", *inputs, "--config", "team.toml", "--run", "team")
    try:
        first.hears(f"   3/{STEPS} ", timeout=900)
    finally:
        first.process.send_signal(signal.SIGKILL)
        first.ends()
    second = Command(tmp_path, "train", *inputs, "--resume", "team")
    assert second.ends(timeout=1200) == 0, second.said

    folder = RunFolder(tmp_path / ".whet" / "runs" / "team")
    report = json.loads(folder.report.read_text())
    # One policy would answer both roles alike: 0.5, whatever it answers.
    assert report["before"]["greedy"] == pytest.approx(0.5)
    assert report["after"]["greedy"] > 0.7
    anyio.run(check_records, folder)
    for name in ("digits", "letters"):
        assert (folder.model / name / "adapter_config.json").is_file()
        assert anyio.run(replay, folder, name) == digest(newest(folder) / name)
    assert not (folder.model / "fixed").exists()


async def check_records(folder: RunFolder) -> None:
    """Every call has its policy; the frozen one is at its first version and has no credit."""
    async with SQLiteStore(folder.store) as store:
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


async def replay(folder: RunFolder, policy: str) -> str:
    """Digest of the weights that a run of this policy alone has, on its own calls."""
    config = folder.config().for_policy(policy)
    assert config.trainer.kind == "local"
    weights = LocalPolicy(
        resolve_model(config.model), config.trainer, device="cpu", seed=config.seed
    )
    trainer, algorithm = LocalTrainer(weights, threads=os.cpu_count()), build_algorithm(config)
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
                assert metrics["unproven_rows"] == 0
            done += select_metrics([record], policy)
            assert weights.version == done[-1].version
    saved = folder.path / "replayed" / policy
    await trainer.save(saved)
    return digest(saved)


def newest(folder: RunFolder) -> Path:
    return max(folder.checkpoints.iterdir())


def digest(checkpoint: Path) -> str:
    files = [checkpoint / name for name in ("weights.safetensors", "optimizer.safetensors")]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files)).hexdigest()
