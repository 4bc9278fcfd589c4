"""A run that starts two vLLM servers and gives both its weights through memory."""

import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import anyio
import httpx
import pytest

import whet
from support.servers.real_vllm import NEEDS_VLLM, ON_A_CPU, PROGRAM
from whet.app.run_folder import RunFolder
from whet.io.files import MEMORY
from whet.store.sqlite import SQLiteStore
from whet.types import Endpoint, StepRecord, Trajectory

pytestmark = [pytest.mark.slow, NEEDS_VLLM]

STEPS = 2
rewards = count(0.0, 0.1)
"""Different for every attempt: what is sampled does not matter."""


async def answer(task: int, llm: Endpoint) -> float:
    async with httpx.AsyncClient(timeout=600, verify=False) as client:
        reply = await client.post(
            f"{llm.base_url}/chat/completions",
            json={
                "model": llm.model,
                "messages": [{"role": "user", "content": f"What is {task} and {task}?"}],
                "max_tokens": 8,
            },
            headers={"Authorization": f"Bearer {llm.api_key}"},
        )
    reply.raise_for_status()
    return next(rewards)


def test_two_servers_of_a_run_sample_and_load_every_version_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ON_A_CPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    engine = {"kind": "vllm", "command": PROGRAM, "replicas": 2, "flags": ["--enforce-eager"]}
    result = whet.train(
        answer,
        [1, 2],
        dir=str(tmp_path),
        steps=STEPS,
        tasks_per_step=2,
        group_size=4,
        engine=engine,  # pyright: ignore[reportArgumentType]
        runner={"processes": 0},
    )
    folder = RunFolder(result.run)
    for log in (folder.path / "vllm.log", folder.path / "vllm-1.log"):
        text = log.read_text()
        # Before the first load there are calls that find out what the server can do.
        later = text.partition("Loaded new LoRA adapter")[2]
        assert re.search(r'"POST (/inference/v1/generate|/v1/completions) HTTP/1.1" 200', later)
        loaded = re.findall(
            r"Loaded new LoRA adapter: name 'whet-[0-9a-f]+-0*(\d+)-.*path '(.*?)'", text
        )
        # Nothing samples from the last version.
        assert {int(version) for version, _ in loaded} == set(range(STEPS))
        assert all(Path(path).is_relative_to(MEMORY) for _, path in loaded)
        assert not any(Path(path).exists() for _, path in loaded), "they leave with the servers"
    steps, sampled = anyio.run(read_steps, folder)
    assert [step.version for step in steps] == [1, 2]
    assert sampled == [{0}, {1}]
    assert all(step.metrics["unproven_generations"] == 0 for step in steps)


async def read_steps(folder: RunFolder) -> tuple[list[StepRecord], list[set[int]]]:
    """The steps, and the versions that sampled the tokens of each."""
    async with SQLiteStore(folder.store) as store:
        steps = [*await store.steps()]
        found = [versions_of(await store.trajectories(step.consumed)) for step in steps]
    return steps, found


def versions_of(trajectories: Sequence[Trajectory]) -> set[int]:
    generations = [g for t in trajectories for call in t.calls for g in call.generations]
    return {version for generation in generations for version in generation.versions}
