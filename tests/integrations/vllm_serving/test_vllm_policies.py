"""Several policies at one vLLM server: each is an adapter of its own."""

import re
from pathlib import Path

import pytest

from support.runs.opposite_policies import check_learned, train_through_a_kill
from support.servers.real_vllm import NEEDS_VLLM, ON_A_CPU, PROGRAM

pytestmark = [pytest.mark.slow, NEEDS_VLLM]


def test_opposite_tasks_are_learned_by_two_adapters_of_one_server_through_a_kill(
    tmp_path: Path,
) -> None:
    server = f'{{ kind = "vllm", command = "{PROGRAM}", flags = ["--enforce-eager"] }}'
    settings = f"tasks_per_step = 4\nengine = {server}"
    folder = train_through_a_kill(tmp_path, 10, settings, environment=ON_A_CPU)
    check_learned(folder)
    log = (folder.path / "vllm.log").read_text()
    adapters = re.findall(r"Loaded new LoRA adapter: name 'whet-([0-9a-f]+)-", log)
    assert len(set(adapters)) >= 2, "each policy has names of its own at the server"
