"""Functions of users' files, by name."""

import pickle
from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.runners.loading import get_spec, load_function

CODE = "def solve(task): return {reward}\n\ndef judge(task): return 1.0\n"


def test_functions_of_one_file_share_its_module_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "both.py"
    file.write_text(CODE.format(reward=0.5))
    agent, judge = load_function(f"{file}:solve"), load_function(f"{file}:judge", "judge")
    assert get_spec(agent) == f"{file}:solve", "other processes find it after the second load"
    assert get_spec(judge) == f"{file}:judge"

    file.write_text(CODE.format(reward=0.125))
    changed = load_function(f"{file}:solve")
    assert callable(changed)
    assert changed(None) == 0.125

    file.write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            load_function(f"{file}:solve")


def test_files_of_one_name_are_modules_of_their_own(tmp_path: Path) -> None:
    files = [tmp_path / name / "agent.py" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(CODE.format(reward=0.5))
    agent, judge = load_function(f"{files[0]}:solve"), load_function(f"{files[1]}:judge", "judge")
    assert pickle.loads(pickle.dumps(agent)) is agent
    assert get_spec(agent) == f"{files[0]}:solve"
    assert get_spec(judge) == f"{files[1]}:judge"


def test_a_file_that_is_a_program_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("def solve(task): return 1.0\nraise SystemExit")
    with pytest.raises(ConfigError, match=r"program\.py' ends the process when it is imported"):
        load_function(f"{file}:solve")
