"""The scripts of `whet completion`, run by the shells that are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from whet.app.cli.main import COMMANDS, main

COMPLETE = """
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_whet
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".whet" / "runs" / "first").mkdir(parents=True)
    (tmp_path / "tasks.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def complete(folder: Path, *words: str) -> set[str]:
    command = ["bash", "-c", COMPLETE, "bash", str(folder / "whet.bash"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_flags_values_runs_and_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "whet.bash").write_text(script("bash", capsys))
    names = {name for group in COMMANDS.values() for name in group}
    assert names <= complete(folder, "whet", "")
    assert complete(folder, "whet", "tr") == {"train"}
    assert complete(folder, "whet", "--log", "in") == {"info"}
    assert {"--steps", "--adam.lr"} <= complete(folder, "whet", "--log", "info", "train", "--")
    assert "--steps" not in complete(folder, "whet", "runs", "--")
    assert complete(folder, "whet", "train", "--engine", "v") == {"vllm"}
    assert complete(folder, "whet", "rescore", "x", "--mode", "a") == {"all"}
    assert complete(folder, "whet", "rollouts", "--mode", "a") == set(), "which has no such mode"
    assert complete(folder, "whet", "show", "f") == {"first"}
    assert "first" in complete(folder, "whet", "eval", "a.py:f", "--model", "")
    assert complete(folder, "whet", "train", "--tasks", "ta") == {"tasks.jsonl"}
    assert complete(folder, "whet", "models", "me") == {"merge"}


def test_the_other_scripts_name_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    names = {name for group in COMMANDS.values() for name in group}
    fish = script("fish", capsys)
    assert all(f"-f -a {name} -d '" in fish for name in names)
    assert "-l engine -x -a 'local vllm sglang'" in fish
    assert script("zsh", capsys).endswith(script("bash", capsys))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_read_their_scripts(
    shell: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (folder / "whet.script").write_text(script(shell, capsys))
    command = [shell, "-n", "whet.script"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    [line] = capsys.readouterr().err.splitlines()
    assert "invalid choice: 'tcsh'" in line
