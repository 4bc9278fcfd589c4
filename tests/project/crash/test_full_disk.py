"""A run on a disk that is really full, and on the same disk once there is room."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.store.small_disk import find_small_disk

pytestmark = pytest.mark.slow

AGENT = """
import json, random, urllib.request

def solve(task, llm):
    body = {"model": llm.model, "messages": [{"role": "user", "content": task}], "max_tokens": 8}
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    url = f"{llm.base_url}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).read()
    return random.random()
"""
COMMANDS = """
cd "$1"; room=$2; shift 2
head -c $((16 * 1024 * 1024 - room)) /dev/zero > filler
"$@"; echo "full: $?"
rm filler
"$@" $(test -d .whet/runs/it && echo --resume it); echo "with room: $?"
"""


@pytest.mark.parametrize("room_kb", [200, 700, 1600], ids="{} KB".format)
def test_a_full_disk_is_one_line_with_what_to_do_and_the_run_goes_on_once_there_is_room(
    room_kb: int, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('"a"\n"b"\n')
    disk = tmp_path / "disk"
    disk.mkdir()
    if (small := find_small_disk(disk, "16m")) is None:
        pytest.skip("this machine allows no mount namespace")
    train = [sys.executable, "-m", "whet", "train", f"{tmp_path / 'agent.py'}:solve"]
    train += [f"--tasks={tmp_path / 'tasks.jsonl'}", "--model=tiny", "--steps=3", "--name=it"]
    train += ["--tasks-per-step=2", "--group-size=2", "--checkpoints.every=1", "--quiet"]
    command = [*small, "sh", "-c", COMMANDS, "sh", str(disk), str(room_kb * 1024), *train]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "400"}
    )
    ends = re.findall(r"(full|with room): (\d+)", done.stdout)
    assert ends == [("full", "2"), ("with room", "0")]
    lines = done.stderr.splitlines()
    [error] = [line for line in lines if line.startswith("whet: ")]
    assert re.search(r"No space left on device|disk is full", error)
    assert "; make room on the disk, then continue with --resume; if `whet runs` does not" in error
    assert "Traceback" not in done.stderr
    assert len(lines) < 10, "not one for each call"
