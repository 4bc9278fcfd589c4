"""`--model ORG/NAME`, against a server that speaks the Hub's API."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from support.servers.hub_server import HubServer, serve_hub
from whet.models.catalog import TINY


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Generator[HubServer]:
    repository = tmp_path_factory.mktemp("hub") / "tiny"
    shutil.copytree(TINY, repository)
    shutil.copy(TINY / "model.safetensors", repository / "consolidated.safetensors")
    with serve_hub({"org/tiny": repository}, gated="org/gated") as server:
        yield server


def whet(
    *arguments: str, home: Path, endpoint: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A command with a cache and a Hub of its own, run in the folder of the cache."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env = kept | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint} | variables
    command = [sys.executable, "-m", "whet", *arguments]
    return subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, check=False)


def get(name: str, home: Path, endpoint: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`whet models get NAME`."""
    return whet("models", "get", name, home=home, endpoint=endpoint, **variables)


def test_a_model_is_downloaded_once_with_progress_and_then_used_offline(
    hub: HubServer, tmp_path: Path
) -> None:
    first = get("org/tiny", tmp_path, hub.url)
    assert first.returncode == 0, first.stderr
    assert "looking up org/tiny on the Hugging Face Hub" in first.stdout
    assert "100%" in first.stderr  # its progress bars
    folder = Path(first.stdout.split("is ready: ")[1].strip())
    assert (folder / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    unneeded = {"README.md", "consolidated.safetensors"}
    assert not unneeded & {*os.listdir(folder)}

    hub.downloads.clear()
    again = get("org/tiny", tmp_path, hub.url)
    offline = get("org/tiny", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert again.stdout == offline.stdout == first.stdout
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/nothing", "the Hugging Face Hub has no model 'org/nothing' that you may read"),
        ("org/gated", "'org/gated' asks for your agreement: accept its terms at"),
    ],
)
def test_a_missing_or_gated_model_is_one_line(
    hub: HubServer, tmp_path: Path, name: str, says: str
) -> None:
    done = get(name, tmp_path, hub.url)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert says in line
    assert "HF_TOKEN" in line


def test_no_network_is_one_line(tmp_path: Path) -> None:
    done = get("org/tiny", tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "cannot reach the Hugging Face Hub at http://127.0.0.1:9" in line
    assert "pass its folder" in line


AGENT = """
import httpx

async def solve(task, llm):
    body = {"model": llm.model, "messages": [{"role": "user", "content": task}], "max_tokens": 4}
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"{llm.base_url}/chat/completions", json=body, headers=headers)
    return float(reply.is_success)
"""


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_and_trained(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('"one"\n')
    run = ("train", "agent.py:solve", "--tasks=tasks.jsonl", "--model=org/tiny", "--name=it")
    sizes = ("--steps=1", "--tasks-per-step=1", "--group-size=2", "--trainer.lora-rank=4")
    sizes += ("--algorithm.name=positive",)  # which trains equal answers too
    done = whet(*run, *sizes, home=tmp_path, endpoint=hub.url)
    assert done.returncode == 0, done.stderr
    assert "looking up org/tiny on the Hugging Face Hub" in done.stdout
    assert "trains org/tiny on 1 task" in done.stdout
    model = tmp_path / ".whet" / "runs" / "it" / "model"
    assert json.loads((model / "adapter_config.json").read_text())["r"] == 4
    assert "org/tiny" in (model / "README.md").read_text()
