"""Errors speak of parameters in Python, and of flags on the command line."""

import pickle
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import whet
from whet.app.cli.main import main
from whet.app.run_folder import RunFolder
from whet.config import resolve
from whet.errors import ConfigError
from whet.io.server import listen
from whet.training.diagnosis import EXPLANATIONS, explain_metrics

COMMAND_WORDS = re.compile(r"--[a-z]|`whet ")
TASKS = "agent.py:solve --tasks tasks.jsonl"


async def solve(task: str, llm: whet.Endpoint) -> float:
    return float(len(task))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("async def solve(task, llm):\n    return 1.0\n")
    Path("tasks.jsonl").write_text('"a"\n')
    Path("file").touch()
    Path("bad.toml").write_text("stpes = 1\n")
    RunFolder.create(resolve({"name": "old"}), "train")
    return tmp_path


@pytest.mark.parametrize(
    ("call", "line", "expected"),
    [
        (
            lambda: whet.train(solve, ["a"], stpes=1),
            f"train {TASKS} --config bad.toml",
            "whet train --help-config",
        ),
        (lambda: whet.train(solve, ["a"], name="old"), f"train {TASKS} --name old", "--resume old"),
        (
            lambda: whet.train(solve, ["a"], resume=True, dir="none"),
            f"train {TASKS} --resume --dir none",
            "without --resume",
        ),
        (
            lambda: whet.train(solve, ["a"], dir="file"),
            f"train {TASKS} --dir file",
            "choose another --dir",
        ),
        (lambda: whet.evaluate(solve, ["a"]), f"eval {TASKS}", "such as --model tiny"),
        (
            lambda: whet.evaluate(solve, ["a"], ["tiny", "tiny"]),
            f"eval {TASKS} --model tiny --model tiny",
            "--model base=tiny",
        ),
        (
            lambda: whet.Trainer().dev(solve, ["a"], samples=0),
            f"dev {TASKS} --samples 0",
            "--samples 0",
        ),
        (lambda: whet.sft(), "sft", "--from RUN"),
        (lambda: whet.show("old"), "show old", "--store"),
    ],
)
def test_an_error_names_parameters_in_python_and_flags_on_the_command_line(
    call: Callable[[], object], line: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert not COMMAND_WORDS.search(str(caught.value))
    assert main(line.split()) == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


def test_a_port_in_use_is_named_by_its_key_and_by_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", taken.getsockname()[1], "--gateway.port")
    assert "choose another with gateway.port, " in str(caught.value)
    assert "choose another with --gateway.port, " in caught.value.command_text


def test_the_reasons_of_a_run_that_trains_nothing_name_no_command() -> None:
    counts = dict.fromkeys(("unselected", "masked", "unproven", "constrained"), 1.0)
    counts = {f"{name}_generations": count for name, count in counts.items()}
    for text in (*EXPLANATIONS.values(), explain_metrics([counts])):
        assert not COMMAND_WORDS.search(text)


def test_both_texts_survive_another_process() -> None:
    error = ConfigError.phrase(python="set x=1", command="set --x 1")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.command_text) == ("set x=1", "set --x 1")
