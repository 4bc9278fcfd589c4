"""The number of files that one model call and one run visit; see `scripts/walk.py`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_CALL_FILES, MOST_RUN_FILES = 24, 50
SWITCHES_TOLERANCE = 5
"""Threads of the store take turns differently from run to run."""


@pytest.mark.slow
def test_a_call_and_a_run_stay_short_and_the_page_has_their_numbers() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "walk.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    walks = json.loads(done.stdout)
    assert walks["call"]["files"] <= MOST_CALL_FILES
    assert walks["files_before_the_loop"] <= MOST_RUN_FILES
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    [call] = re.findall(r"^\| a model call \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    [run] = re.findall(r"^\| a run, before its loop \| (\d+) \|", page, re.MULTILINE)
    files, functions, switches = map(int, call)
    assert (files, functions) == (walks["call"]["files"], walks["call"]["functions"])
    assert abs(switches - walks["call"]["switches"]) <= SWITCHES_TOLERANCE
    assert int(run) == walks["files_before_the_loop"]
