"""The runs of a folder, also while other processes write and delete them."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import anyio
import pytest

import whet
from support.runs.recorded_run import record_run
from whet.app.cli.main import main
from whet.app.inspection.run_list import EVALUATION_KIND, find_newest, list_runs
from whet.app.run_folder import RunFolder
from whet.config import resolve
from whet.errors import ConfigError
from whet.io.files import JsonLines


def test_runs_are_listed_while_their_checkpoints_come_and_go(tmp_path: Path) -> None:
    folder = RunFolder.create(resolve({"dir": str(tmp_path), "name": "a"}), "train")
    ended = threading.Event()

    def train() -> None:
        while not ended.is_set():
            for name in ("step-0", "step-1"):
                checkpoint = folder.checkpoints / name
                checkpoint.mkdir()
                (checkpoint / "weights").touch()
                shutil.rmtree(checkpoint)

    training = threading.Thread(target=train)
    training.start()
    try:
        found = [[run.name for run in list_runs(tmp_path)] for _ in range(300)]
    finally:
        ended.set()
        training.join()
    assert found == [["a"]] * 300


def make_run(directory: Path, name: str, model: str = "tiny", kind: str = "train") -> RunFolder:
    return RunFolder.create(resolve({"dir": str(directory), "name": name, "model": model}), kind)


def test_the_steps_of_a_run_without_a_report_are_those_of_its_metrics(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a")
    lines = [
        {"kind": "config"},
        {"kind": "step", "step": 1, "reward": 0.25},
        {"kind": "step", "step": 2},  # all failed
        {"kind": "step", "step": 3, "reward": 0.75},
        {"kind": "step"},  # of another program
        5,
    ]
    written = "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st'
    folder.metrics.write_text(written)
    [found] = list_runs(tmp_path)
    assert (found.state, found.steps, found.reward) == ("stopped", 3, 0.75)
    assert found.rewards == (0.25, None, 0.75)
    folder.write_report({"steps": 2, "rewards": [0.25, None], "problem": None})
    [found] = list_runs(tmp_path)
    assert (found.state, found.steps, found.reward) == ("done", 2, None)
    with folder.lock():  # resumed: the report is of its earlier steps
        [found] = list_runs(tmp_path)
    assert (found.state, found.steps, found.reward) == ("running", 3, 0.75)


def test_the_table_of_runs_fits_80_columns_with_whole_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"
    names = ("demo-arithmetic-20261119-181031-383b", "it")
    make_run(tmp_path, names[0], kind="demo-arithmetic")
    make_run(tmp_path, names[1], model=hub)
    for columns, titles in (("80", "run model state steps reward gain age"), ("160", "kind")):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["runs", "--dir", str(tmp_path)]) == 0
        header, *rows = capsys.readouterr().out.splitlines()
        assert titles in header if columns == "160" else titles.split() == header.split()
        assert max(map(len, rows)) <= int(columns)
        for name in names:
            assert any(row.startswith(f"{name} ") for row in rows)


@pytest.mark.parametrize("name", ["config.json", "report.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_run_with_a_damaged_file_is_listed_among_the_others(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "whole")
    (make_run(tmp_path, "damaged").path / name).write_bytes(content)
    assert main(["runs", "--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "whole" in shown
    assert "damaged" in shown


def test_a_run_that_is_named_twice_is_deleted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "a")
    assert main(["clean", "a", "a", "--yes", "--dir", str(tmp_path)]) == 0
    assert "deleted 1 run" in capsys.readouterr().out
    assert list_runs(tmp_path) == []


def test_runs_are_deleted_by_name_or_because_they_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "a")
    assert main(["clean", "a", "--failed", "--yes", "--dir", str(tmp_path)]) == 2
    assert "found --failed and the run 'a': leave one out" in capsys.readouterr().err
    assert [run.name for run in list_runs(tmp_path)] == ["a"]


def test_a_run_that_is_only_read_becomes_no_newer(tmp_path: Path) -> None:
    read, newest = (make_run(tmp_path, name) for name in ("read", "newest"))
    for folder, age in ((read, 200), (newest, 100)):
        anyio.run(record_run, folder)
        then = time.time() - age
        for file in folder.path.rglob("*"):
            os.utime(file, (then, then))
    assert main(["show", "read", "--dir", str(tmp_path)]) == 0
    assert find_newest(tmp_path) == "newest"


def test_of_an_evaluation_of_several_models_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path, "compared", kind=EVALUATION_KIND)
    JsonLines(folder.models).append({"name": "base"}, {"name": "trained"})
    make_run(tmp_path, "mine")
    for command in ("show", "rollouts"):
        for flags in (["compared"], ["compared", "--model=other"]):
            assert main([command, *flags, "--dir", str(tmp_path)]) == 2
            expected = "'compared' has the models base, trained: choose one with --model trained"
            assert expected in capsys.readouterr().err
        assert main([command, "mine", "--model=base", "--dir", str(tmp_path)]) == 2
        assert "the run 'mine' is not an evaluation of models" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="choose one with model='trained'"):
        whet.show(folder.path)


def test_the_hint_below_the_table_of_runs_breaks_no_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "it")
    assert main(["runs", "--dir", str(tmp_path)]) == 0
    assert "\n`whet clean` deletes runs of `whet dev`\n" in capsys.readouterr().out
