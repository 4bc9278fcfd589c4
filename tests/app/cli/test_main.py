"""Errors of users: one line that says how to fix it, exit code 2, and no files left behind."""

import argparse
import importlib
import io
import json
import re
import shlex
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from whet.app.cli import main as main_module
from whet.app.cli.config_flags import list_config_fields, read_config_values
from whet.app.cli.flags import check_after, split_after
from whet.app.cli.main import main
from whet.app.run_folder import RunFolder
from whet.config import resolve
from whet.errors import WhetError
from whet.store.schema import VERSION

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
        [sys.executable, "-m", "whet", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_main(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, where the slow imports are done."""
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, int(code or 0), out, err)


def assert_refused(done: subprocess.CompletedProcess[str], *expected: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for text in expected:
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
    ("line", "expected"),
    [
        ("demo --stepz 3", "unknown flag --stepz, did you mean --steps?"),
        ("demo --lr 1e-3", "unknown flag --lr, did you mean --adam.lr? see `whet demo --help`"),
        ("demo --batch-size 3", "unknown flag --batch-size, did you mean --tasks-per-step?"),
        ("--verbose demo", "unknown flag --verbose"),
        ("demo nothing", "invalid choice: 'nothing'"),
        ("demo --steps many", "config key 'steps'"),
        ("demo --adam.lr -1", "adam.lr"),
        ("demo --model tyni", "there is no model 'tyni'"),
        ("demo --algorithm.name gpro", "unknown algorithm 'gpro', perhaps 'grpo'"),
        ("demo --algorithm.name rloo --algorithm.divide-by-std 1", "does not read"),
        ("demo --loop.max-staleness 3", "max_staleness has no meaning with loop.name"),
        ("demo --dir file/under", "cannot write to 'file/under"),
        ("demo --dir /proc/whet", "choose another --dir"),
        ("demo --resume", "there is no run to resume"),
        ("demo --resume nothing", "there is no run 'nothing': expected a folder of a run"),
        ("train --tasks t.jsonl node a.js", "a.js, did you mean `-- node a.js`, a command at the"),
        ("train a.py:f --tasks t.jsonl --samples 5", "--samples is for a dev run: add --debug"),
        ("train --resume mine", "as in whet train AGENT --tasks FILE --resume mine"),
        ("launch", "invalid choice: 'launch'"),
        (
            "trains agent.py:solve",
            "invalid choice: 'trains', did you mean 'train'? see `whet --help",
        ),
        ("serve mine", "whet serve: unrecognized arguments: mine, did you mean --model mine? see"),
        ("show mine", "there is no run 'mine': expected a folder of a run"),
        ("up agent.py:solve", "no tasks: name a file with --tasks"),
        (
            "train agent.py:solve --tasks tasks.jsonl --trainer verl --judge j.py:f",
            "leave out --prom",
        ),
        (
            "train agent.py:solve --tasks tasks.jsonl --trainer verl --prompt p.md",
            "leave out --prom",
        ),
        ("store -- --max-num-seqs 4", "this command starts no server: leave out '-- --max-num"),
        ("demo -- node agent.js", "this command runs no agent: leave out '-- node ag"),
        ("runner agent.py:solve -- --eager", "this command starts no server"),
        ("doctor --store http://127.0.0.1:9", "name the run with --run"),
        (
            "up --tasks tasks.jsonl",
            "found 0 agents, expected one: module:function, --service URL, --env NAME, or a",
        ),
        ("up agent.py:solve --tasks tasks.jsonl -- node agent.js", "found 2"),
        (
            "train agent.py:solve --tasks tasks.jsonl --reward exit",
            "--reward is only for a command",
        ),
        ("demo --max-new-tokens 9", "--max-new-tokens, the agent sends max_tokens in its own requ"),
        ("demo --output-dir x", "unknown flag --output-dir, did you mean --dir?"),
        ("--log info", "the following arguments are required: COMMAND"),
        ("models get nothing", "there is no model 'nothing'"),
        ("eval agent.py:solve --tasks tasks.jsonl --model a-run", "a run that `whet runs` lists"),
        ("train agent.py:solve", "no tasks: name a file with --tasks"),
        (
            "train agent.py:solve --tasks tasks.jsonl --algorithm.name agent.py:solve",
            "an algorithm has a method `async def credit",
        ),
        ("train agent --tasks tasks.jsonl", "module:function or file.py:function"),
        ("train agent.js --tasks tasks.jsonl", "found 'agent.js'; a program in another language"),
        ("train agent.py:absent --tasks tasks.jsonl", "'agent.py' has no 'absent'"),
        ("train agent.py:slove --tasks tasks.jsonl", "no 'slove', did you mean 'solve'?"),
        ("train agent.py:solve --tasks tasks.jsonl --algorithm rloo", "--algorithm.name rloo"),
        ("train absent.py:solve --tasks tasks.jsonl", "cannot import the agent 'absent.py:solve'"),
        ("train no.such.module:solve --tasks tasks.jsonl", "No module named 'no'"),
        ("train :solve --tasks tasks.jsonl", "cannot import the agent ':solve'"),
        ("train broken.py:solve --tasks tasks.jsonl", "ZeroDivisionError: division by zero"),
        ("train garbled.py:solve --tasks tasks.jsonl", "SyntaxError"),
        (
            "train agent.py:asks_too_much --tasks tasks.jsonl",
            "unknown parameter 'judge'; expected one of task, llm",
        ),
        ("train agent.py:not_a_function --tasks tasks.jsonl", "an agent is a function"),
        ("train agent.py:solve --tasks absent.jsonl", "cannot read the tasks 'absent.jsonl'"),
        ("train agent.py:solve --tasks bad.jsonl", "expected one JSON value on each line"),
        ("train agent.py:solve --tasks tasks.jsonl --held-out bad.jsonl", "line 2 is not JSON"),
        (
            "train agent.py:solve --tasks tasks.jsonl --config bad.toml",
            "unknown config key 'stpes'",
        ),
        ("train agent.py:solve --tasks tasks.jsonl --config no.toml", "cannot read the config"),
        (
            "train agent.py:solve --tasks tasks.jsonl --config rate.toml",
            "unknown config key 'learning_rate': did you mean 'adam.lr'? `whet train --help-config",
        ),
        (
            "train agent.py:solve --tasks tasks.jsonl --name a/b",
            "expected letters, digits, '_', '.' and '-', the first a letter or digit, found 'a/b'",
        ),
        ("train agent.py:solve --tasks tasks.jsonl --dir file", "choose another --dir"),
        ("eval agent.py:solve --tasks tasks.jsonl", "no model to evaluate"),
        ("eval agent.py:solve --tasks bad.jsonl --model tiny", "'bad.jsonl' line 2 is not JSON"),
        ("eval agent.py:solve --tasks tasks.jsonl --model tyni", "there is no model 'tyni'"),
        ("eval agent.py:solve --tasks tasks.jsonl --model a=tiny --model a=x", "no model 'x'"),
        ("eval agent.py:solve --tasks tasks.jsonl --model tiny --adam.lr 1", "unknown flag"),
        ("eval agent.py:solve --tasks tasks.jsonl --model tiny --resume no", "there is no run"),
        (
            "eval agent.py:solve --tasks tasks.jsonl --model x --endpoint http://127.0.0.1:9",
            "the endpoint 'http://127.0.0.1:9' does not answer",
        ),
        (
            "eval agent.py:solve --tasks tasks.jsonl --model tiny --evaluation.samples 0 "
            "--evaluation.greedy false",
            "nothing to evaluate: set evaluation.greedy",
        ),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, line: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.jsonl").write_text('"one"\n{"two"\n')
    (folder / "bad.toml").write_text("stpes = 3\n")
    (folder / "rate.toml").write_text("learning_rate = 1\n")
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "agent.js").write_text("console.log(1)\n")
    (folder / "garbled.py").write_text("def solve(\n")
    assert_refused(run_main(capsys, *line.split()), expected)
    assert not (folder / ".whet").exists(), "a run that cannot start leaves nothing"


def test_an_unknown_flag_ends_the_process(folder: Path) -> None:
    assert_refused(
        whet(folder, "demo", "--stepz", "3"), "unknown flag --stepz, did you mean --steps?"
    )


def test_models_are_listed_with_and_without_the_word(capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(capsys, "models", "list")
    assert done.returncode == 0
    assert "tiny " in done.stdout
    assert run_main(capsys, "models").stdout == done.stdout


def test_serve_says_what_it_waits_for_and_what_else_to_type_and_gives_up(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.app.composition.distributed.TOKEN_WAIT_S", 0.0)
    monkeypatch.delenv("WHET_STORE_TOKEN", raising=False)
    done = run_main(capsys, "serve", "--run=mine")
    assert done.returncode == 2
    advice = (
        "start `whet store` with this --dir, or set WHET_STORE_TOKEN; `whet serve --model mine`"
    )
    assert "waiting for the store's token in .whet/store.token" in done.stdout
    assert advice in done.stdout
    assert done.stderr.startswith("whet: no store's token in .whet/store.token after 0 s: start")
    assert advice in done.stderr


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:hunter2@db.example/whet",
        "postgresql://me:p@hunter2@db.example/whet",
        "postgres:///whet?host=/tmp&password=hunter2&user=me",
    ],
)
def test_a_database_without_a_token_is_one_line_at_once_without_its_password(
    address: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WHET_STORE_TOKEN", raising=False)
    done = run_main(capsys, "serve", f"--store={address}")
    assert done.returncode == 2
    assert "/whet" in done.stderr
    assert "set WHET_STORE_TOKEN to a secret of your choice, the same for" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_a_full_disk_is_reported_with_what_to_do() -> None:
    for reason in ("I/O error: No space left on device", "database or disk is full"):
        full = main_module.describe(WhetError(f"training failed: {reason}"))
        assert "; make room on the disk, then continue with --resume; if `whet runs` does" in full
    assert main_module.describe(WhetError("a\n  b")) == "a b"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_long_lines_broken_between_words_and_a_file_whole_ones(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("demo", "--loop.max-staleness", "3")
    [whole] = run_main(capsys, *line).stderr.splitlines()
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(line) == 2
    lines = terminal.getvalue().splitlines()
    assert len(lines) > 1
    assert " ".join(each.strip() for each in lines) == whole
    assert main_module.wrap_line("warning: short", terminal) == "warning: short"


@pytest.mark.slow
def test_a_port_in_use_ends_the_process(folder: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = whet(folder, *TRAIN, "--model", str(model), "--gateway.port", port, "--quiet")
    assert_refused(done, f"cannot listen on 127.0.0.1:{port}", "--gateway.port")


def test_a_model_that_cannot_be_loaded_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    done = run_main(capsys, *TRAIN, "--model", "model")
    assert_refused(done, "cannot load the model in 'model'")


def test_a_run_of_your_own_agent_from_the_command_line(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.toml").write_text("steps = 2\ntasks_per_step = 2\n[trainer]\nweights = 'full'")
    common = [*TRAIN, "--model", str(model), "--config", "run.toml", "--group-size", "4"]
    arguments = [
        *common,
        "--held-out",
        "tasks.jsonl",
        "--json",
        "--tracking.names=jsonl,tensorboard",
    ]

    done = run_main(capsys, *arguments, "--name", "mine")

    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["steps"] == 2
    assert numbers["rollouts"] == 16
    assert numbers["unproven_generations"] == 0
    assert numbers["rows"] == numbers["trained_rollouts"] > 0
    run = folder / ".whet" / "runs" / "mine"
    assert json.loads((run / "config.json").read_text())["group_size"] == 4
    assert (run / "model" / "model.safetensors").exists()
    card = (run / "model" / "README.md").read_text()
    assert "- Agent: `solve`\n- Trained on: 2 tasks of tasks.jsonl\n- Seed: 0\n" in card
    assert (run / "curve.png").exists()
    assert len(list((run / "checkpoints").iterdir())) == 1

    again = run_main(capsys, *arguments, "--resume")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) | {"seconds": 0} == numbers | {"seconds": 0}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["config", "step", "step", "result"]
    # A step whose answers happen to be all right or all wrong trains nothing.
    assert lines[1].keys() | lines[2].keys() >= {
        *("reward", "mismatch_kl", "clip_fraction", "staleness", "zero_signal_fraction", "entropy"),
        *("calls_per_row", "trained_tokens", "collect_seconds", "train_seconds"),
    }
    assert lines[-1]["rollouts"] == 16
    assert len(list((run / "tensorboard").iterdir())) == 2  # a file for each process

    assert_refused(run_main(capsys, *arguments, "--name", "mine"), "exists already")
    assert_refused(run_main(capsys, "view", "mien"), "no run 'mien': did you mean 'mine'? expected")
    assert_refused(
        run_main(capsys, *arguments, "--resume", "mine", "--seed", "9"),
        "keeps its config: 'seed'",
    )
    more = ("--resume", "mine", "--steps", "9")
    assert_refused(run_main(capsys, *common, *more), "the held-out tasks are not those")
    with RunFolder(run).lock():
        assert_refused(run_main(capsys, *arguments, *more), "'mine' is in use by another process")
    with closing(sqlite3.connect(run / "store.db")) as db:
        db.execute(f"PRAGMA user_version = {VERSION - 1}")
    other = f"has schema version {VERSION - 1}, expected {VERSION}: open it with the version"
    assert_refused(run_main(capsys, *arguments, "--resume", "mine", "--steps", "9"), other)
    assert json.loads((run / "config.json").read_text())["steps"] == 2, "refused: nothing changes"


def test_text_that_no_encoding_has_is_shown_escaped(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "lone.py").write_text("def fail(task, llm):\n    raise OSError(task)\n")
    (folder / "tasks.jsonl").write_text('"a\\udcff"\n')
    done = run_main(capsys, "dev", "lone.py:fail", "--tasks", "tasks.jsonl", "--model", str(model))
    assert done.returncode == 1
    assert "the agent raised: OSError: a\\udcff (lone.py:2)" in done.stdout
    for command in ("show --failed", "show --failed --json", "rollouts", "rollouts --json"):
        shown = run_main(capsys, *command.split())
        assert shown.returncode == 0, shown.stderr
        assert "a\\udcff" in shown.stdout


def test_an_evaluation_from_the_command_line_prints_its_numbers_as_json(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["eval", "agent.py:solve", "--tasks", "tasks.jsonl", "--name", "mine", "--json"]
    done = run_main(capsys, *line, "--model", f"base={model}", "--model", f"same={model}")

    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["tasks"] == 2
    gain = numbers["models"]["same"]["gain"]["greedy"]
    assert (gain["mean"], gain["tasks"]) == (0, 2)
    assert "greedy" in done.stderr  # the table for people
    assert len(Path(numbers["results"]).read_text().splitlines()) == 8
    assert Path(numbers["picture"]).exists()


COMMANDS = [name for commands in main_module.COMMANDS.values() for name in commands]


@pytest.mark.parametrize("arguments", [(), ("--help",)], ids=["alone", "with --help"])
def test_help_lists_every_command_by_group_with_one_line_each(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    done = run_main(capsys, *arguments)
    assert done.returncode == 0
    for title, commands in main_module.COMMANDS.items():
        assert f"\n{title}:\n" in done.stdout
        for name, command in commands.items():
            assert re.search(rf"^  whet {name} +{re.escape(command.help)}$", done.stdout, re.M)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_in_60_lines_of_80_columns_with_a_text_for_every_flag(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run_main(capsys, name, "--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"usage: whet {name} ")
    for number, line in enumerate(lines):
        if line.startswith("  -"):  # a flag has its text beside it, or below
            assert len(line.split("  ")) > 2 or lines[number + 1].startswith(" " * 20), line


def test_the_list_of_config_keys_is_broken_to_the_columns_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run_main(capsys, "train", "--help-config").stdout
    assert max(len(line) for line in shown.splitlines() if line.startswith(" " * 6)) <= 80


def test_a_run_of_several_processes_has_a_default_name(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_main(capsys, "up", "--help").stdout
    [line] = [each for each in shown.splitlines() if "--run " in each]
    assert line.endswith("name of the run (default default)")


@pytest.mark.parametrize(
    "name", ["train", "dev", "eval", "serve", "runner", "demo", "chat", "show", "rollouts"]
)
def test_the_help_of_a_common_command_ends_with_examples_that_it_accepts(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run_main(capsys, name, "--help").stdout
    [_, examples] = shown.split("\nexamples:\n")
    assert 1 <= len(examples.splitlines()) <= 2
    for line in examples.splitlines():
        program, *words = shlex.split(line)
        assert program == "whet"
        before, after = split_after(words)
        args = main_module.build_parser().parse_args(before, argparse.Namespace(after=after))
        check_after(args)
        resolve(read_config_values(args))


def test_the_help_of_the_demo_has_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(run_main(capsys, "demo", "--help").stdout.split())
    for flag, default in {
        "--model NAME": "arithmetic tiny; hello smollm2",
        "--steps N": "arithmetic 24, with smollm2 20; hello 12, with tiny 16",
        "--trainer.weights KIND": "arithmetic full, with smollm2 lora; hello lora",
        "--adam.lr X": "arithmetic 0.0003; hello 0.0003, with tiny 0.0005",
        "--group-size N": "8",
        "--seed N": "0",
    }.items():
        assert text.partition(flag)[2].partition("(default ")[2].startswith(f"{default})"), flag
    assert "(default 20)" in run_main(capsys, "train", "--help").stdout


def test_every_config_key_is_in_help_config_with_its_type_default_and_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = run_main(capsys, "train", "--help-config")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for key, field in list_config_fields():
        if key.startswith("supervised."):  # for `whet sft` and `whet dpo`
            continue
        assert f"--{key.replace('_', '-')} " in text
        assert " ".join((field.description or "").split()) in text
    assert "--adam.beta2 number, default 0.99" in text
    assert "--trainer.weights lora|full, default lora" in text


def test_a_command_that_takes_some_keys_lists_those_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = run_main(capsys, "serve", "--help-config").stdout
    assert "--gateway.port" in text
    assert "--adam.lr" not in text


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_main(capsys, "--version").stdout
    assert re.fullmatch(r"whet \d+\.\d+\.\d+\n", shown)
    assert shown.split()[1] == importlib.import_module("whet").__version__
