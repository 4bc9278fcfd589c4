"""`--model ORG/NAME`, against a server that speaks the Hub's API."""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from support.hub_server import HubServer, serve_hub
from whet.models.catalog import TINY


@pytest.fixture(scope="module")
def hub() -> Generator[HubServer]:
    with serve_hub({"org/tiny": TINY}, gated="org/gated") as server:
        yield server


def get(name: str, home: Path, endpoint: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`whet models get NAME`, with a cache and a Hub of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env = kept | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint} | variables
    command = [sys.executable, "-m", "whet", "models", "get", name]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_model_is_downloaded_once_with_progress_and_then_used_offline(
    hub: HubServer, tmp_path: Path
) -> None:
    first = get("org/tiny", tmp_path, hub.url)
    assert first.returncode == 0, first.stderr
    assert "looking up org/tiny on the Hugging Face Hub" in first.stdout
    assert "100%" in first.stderr  # its progress bars
    folder = Path(first.stdout.split("is ready: ")[1].strip())
    assert (folder / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    assert "README.md" not in os.listdir(folder)  # nothing that is not needed

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
