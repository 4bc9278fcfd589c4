"""What a user gets wrong: one line that says how to mend it, exit code 2, nothing left behind."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from whet.app.cli import main

AGENT = """
import httpx

async def solve(task, llm):
    async with httpx.AsyncClient(base_url=llm.base_url + "/", verify=False) as client:
        reply = await client.post(
            "chat/completions",
            headers={"Authorization": f"Bearer {llm.api_key}"},
            json={
                "model": llm.model,
                "messages": [{"role": "user", "content": task}],
                "max_tokens": 4,
            },
        )
    text = reply.json()["choices"][0]["message"]["content"] or ""
    return len(text) / 8

def asks_too_much(task, llm, judge):
    return 0.0

not_a_function = 3
"""


def whet(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. A child it left behind would hold the pipes, and this open."""
    return subprocess.run(
        [sys.executable, "-m", "whet.app.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def here(capsys: pytest.CaptureFixture[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has the heavy imports behind it."""
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, int(code or 0), out, err)


def refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for text in said:
        assert text in done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('"one"\n"two"\n')
    (tmp_path / "file").write_text("in the way")
    return tmp_path


TRAIN = ("train", "agent.py:solve", "--tasks", "tasks.jsonl")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("demo --stepz 3", "unknown flag --stepz, perhaps --steps"),
        ("--verbose demo", "unknown flag --verbose"),
        ("demo nothing", "invalid choice: 'nothing'"),
        ("demo --steps many", "config key 'steps'"),
        ("demo --adam.lr -1", "adam.lr"),
        ("demo --model tyni", "there is no model 'tyni'"),
        ("demo --algorithm.name gpro", "there is no algorithm 'gpro', perhaps 'grpo'"),
        ("demo --algorithm.name rloo --algorithm.divide-by-std 1", "does not read"),
        ("demo --loop.max-staleness 3", "max_staleness has no meaning on policy"),
        ("demo --dir file/under", "cannot write to 'file/under"),
        ("demo --dir /proc/whet", "choose another --dir"),
        ("demo --resume", "there is no run to resume"),
        ("demo --resume nothing", "is not a run"),
        ("launch", "invalid choice: 'launch'"),
        ("store -- --max-num-seqs 4", "this command starts no server: leave out '-- --max-num"),
        ("demo -- node agent.js", "this command runs no agent of yours: leave out '-- node ag"),
        ("runner agent.py:solve -- --eager", "this command starts no server"),
        ("doctor --store http://127.0.0.1:9", "name the run with --run"),
        ("up --tasks tasks.jsonl", "name one agent: module:function, or --service URL, or a"),
        ("up agent.py:solve --tasks tasks.jsonl -- node agent.js", "found 2"),
        ("train agent.py:solve --tasks tasks.jsonl --reward exit", "--reward is for a command"),
        ("", "the following arguments are required: COMMAND"),
        ("models get nothing", "invalid choice: 'nothing'"),
        ("train agent.py:solve", "required: --tasks"),
        (
            "train agent.py:solve --tasks tasks.jsonl --algorithm.name agent.py:solve",
            "an algorithm has a method `async def credit",
        ),
        ("train agent --tasks tasks.jsonl", "module:function or file.py:function"),
        ("train agent.py:absent --tasks tasks.jsonl", "'agent.py' has no 'absent'"),
        ("train absent.py:solve --tasks tasks.jsonl", "cannot import the agent 'absent.py:solve'"),
        ("train no.such.module:solve --tasks tasks.jsonl", "No module named 'no'"),
        ("train :solve --tasks tasks.jsonl", "cannot import the agent ':solve'"),
        ("train broken.py:solve --tasks tasks.jsonl", "ZeroDivisionError: division by zero"),
        ("train garbled.py:solve --tasks tasks.jsonl", "SyntaxError"),
        (
            "train agent.py:asks_too_much --tasks tasks.jsonl",
            "asks for 'judge'; there are task, llm",
        ),
        ("train agent.py:not_a_function --tasks tasks.jsonl", "an agent is a function"),
        ("train agent.py:solve --tasks absent.jsonl", "cannot read the tasks 'absent.jsonl'"),
        ("train agent.py:solve --tasks bad.jsonl", "'bad.jsonl' line 2 is not JSON"),
        ("train agent.py:solve --tasks tasks.jsonl --held-out bad.jsonl", "line 2 is not JSON"),
        (
            "train agent.py:solve --tasks tasks.jsonl --config bad.toml",
            "unknown config key 'stpes'",
        ),
        ("train agent.py:solve --tasks tasks.jsonl --config no.toml", "cannot read the config"),
        ("train agent.py:solve --tasks tasks.jsonl --dir file", "choose another --dir"),
        ("eval agent.py:solve --tasks tasks.jsonl", "there is no model to evaluate"),
        ("eval agent.py:solve --tasks bad.jsonl --model tiny", "'bad.jsonl' line 2 is not JSON"),
        ("eval agent.py:solve --tasks tasks.jsonl --model tyni", "there is no model 'tyni'"),
        ("eval agent.py:solve --tasks tasks.jsonl --model a=tiny --model a=x", "no model 'x'"),
        ("eval agent.py:solve --tasks tasks.jsonl --model tiny --adam.lr 1", "unknown flag"),
        ("eval agent.py:solve --tasks tasks.jsonl --model tiny --resume no", "is not a run"),
        (
            "eval agent.py:solve --tasks tasks.jsonl --model x --endpoint http://127.0.0.1:9",
            "the endpoint 'http://127.0.0.1:9' does not answer",
        ),
        (
            "eval agent.py:solve --tasks tasks.jsonl --model tiny --evaluation.samples 0 "
            "--evaluation.greedy false",
            "an evaluation is greedy or sampled",
        ),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.jsonl").write_text('"one"\n{"two"\n')
    (folder / "bad.toml").write_text("stpes = 3\n")
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "garbled.py").write_text("def solve(\n")
    refused(here(capsys, *line.split()), said)
    assert not (folder / ".whet").exists(), "a run that cannot start leaves nothing"


def test_an_unknown_flag_ends_the_process(folder: Path) -> None:
    refused(whet(folder, "demo", "--stepz", "3"), "unknown flag --stepz, perhaps --steps")


def test_a_port_in_use_ends_the_process(folder: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = whet(folder, *TRAIN, "--model", str(model), "--gateway.port", port, "--quiet")
    refused(done, f"cannot listen on 127.0.0.1:{port}", "--gateway.port")


def test_a_model_that_cannot_be_loaded_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    done = here(capsys, *TRAIN, "--model", "model", "--quiet")
    refused(done, "cannot load the model in 'model'")


def test_a_run_of_your_own_agent_from_the_command_line(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.toml").write_text("steps = 2\ntasks_per_step = 2\n[trainer]\nweights = 'full'")
    common = [*TRAIN, "--model", str(model), "--config", "run.toml", "--group-size", "4"]
    told = [*common, "--held-out", "tasks.jsonl", "--json", "--tracking.names=jsonl,tensorboard"]

    done = here(capsys, *told, "--name", "mine")

    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["steps"] == 2
    assert numbers["rollouts"] == 16
    assert numbers["unproven_rows"] == 0
    assert numbers["rows"] == numbers["trained_rollouts"] > 0
    run = folder / ".whet" / "runs" / "mine"
    assert json.loads((run / "config.json").read_text())["group_size"] == 4
    assert (run / "model" / "model.safetensors").exists()
    assert (run / "curve.png").exists()
    assert len(list((run / "checkpoints").iterdir())) == 1

    again = here(capsys, *told, "--resume")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) | {"seconds": 0} == numbers | {"seconds": 0}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["config", "step", "step", "result"]
    assert lines[1].keys() >= {
        *("reward", "mismatch_kl", "clip_fraction", "staleness", "silent_groups", "entropy"),
        *("merge_ratio", "trained_tokens", "collect_seconds", "train_seconds"),
    }
    assert lines[-1]["rollouts"] == 16
    assert len(list((run / "tensorboard").iterdir())) == 2  # a file for each process

    refused(here(capsys, *told, "--name", "mine"), "exists already")
    refused(here(capsys, *told, "--resume", "mine", "--steps", "9"), "keeps its config: 'steps'")
    refused(here(capsys, *common, "--resume", "mine"), "the held-out tasks are not those")


def test_an_evaluation_from_the_command_line_says_its_numbers_as_json(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["eval", "agent.py:solve", "--tasks", "tasks.jsonl", "--name", "mine", "--json"]
    done = here(capsys, *line, "--model", f"base={model}", "--model", f"same={model}")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["tasks"] == 2
    assert told["models"]["same"]["gain"]["greedy"] == {"mean": 0, "ci95": [0, 0], "tasks": 2}
    assert "greedy" in done.stderr  # the table for people
    assert len(Path(told["results"]).read_text().splitlines()) == 8
    assert Path(told["picture"]).exists()
