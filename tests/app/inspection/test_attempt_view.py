"""Attempts as trees: forks and generations that are never trained."""

import io
import json
from functools import partial
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from support.runs.recorded_run import make_folder, record_run
from support.store.records import MINUTE, call
from whet.app.cli.main import main
from whet.app.inspection.attempt_view import AttemptView, draw_attempt
from whet.app.run_folder import RunFolder
from whet.store.sqlite import SQLiteStore
from whet.types import (
    AttemptId,
    AttemptRecord,
    Failure,
    FailureKind,
    Mode,
    Outcome,
    Rollout,
    Sampling,
    Status,
)

AGENTS = """
from openai import AsyncOpenAI

def user(text):
    return {"role": "user", "content": text}

async def ask(llm, messages, **options):
    options |= {"model": llm.model, "max_tokens": 4, "messages": messages}
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        reply = await client.chat.completions.create(**options)
    return {"role": "assistant", "content": reply.choices[0].message.content or ""}

async def forks(task, llm):
    start = [user("first")]
    reply = await ask(llm, start)
    await ask(llm, [*start, reply, user("second")])
    await ask(llm, [user("another"), reply, user("second")])
    return 1.0

async def constrained(task, llm):
    await ask(llm, [user("first")], response_format={"type": "json_object"})
    return 1.0

async def partly_constrained(task, llm):
    await ask(llm, [user("first")], response_format={"type": "json_object"})
    await ask(llm, [user("second")])
    return 1.0

async def silent(task, llm):
    return 1.0
"""


def run_dev(
    folder: Path, model: Path, agent: str, capsys: pytest.CaptureFixture[str], code: int = 0
) -> str:
    (folder / "shown.py").write_text(AGENTS)
    (folder / "tasks.jsonl").write_text('"one"\n')
    assert main(["dev", f"shown.py:{agent}", "--tasks=tasks.jsonl", f"--model={model}"]) == code
    out, err = capsys.readouterr()
    assert err.count("\n") == (1 if code else 0)
    return " ".join((out + err).replace("│", " ").split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_dev_shows_the_call_that_forks_and_why(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run_dev(folder, model, "forks", capsys)
    _, first, second, third = shown.split("── call ")
    assert "fork:" not in first + second
    assert " fork: new_conversation" in third


def test_dev_shows_an_answer_that_is_constrained(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "constrained: never trained" in run_dev(folder, model, "constrained", capsys, code=1)
    shown = run_dev(folder, model, "partly_constrained", capsys)
    assert shown.count("constrained: never trained") == 1


def test_dev_advises_to_train_an_agent_with_answers_that_can_be_trained(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for agent in ("forks", "partly_constrained"):
        assert f"next: `whet train shown.py:{agent}" in run_dev(folder, model, agent, capsys)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (
            "silent",
            "1 x rollouts made no model call: give the agent's client base_url=llm.base_url and "
            "api_key=llm.api_key, and turn off its cache",
        ),
        (
            "constrained",
            "1 x an answer was constrained by a JSON schema or a forced tool call, which is not "
            "trained: let the model answer freely",
        ),
    ],
)
def test_dev_fails_where_training_would_learn_nothing_and_says_why(
    agent: str, reason: str, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run_dev(folder, model, agent, capsys, code=1)
    assert "whet train" not in shown
    assert f"next: fix the agent, then `whet dev shown.py:{agent}" in shown
    assert shown.endswith(f"whet: training would learn nothing from 1 attempt: {reason}")


def test_show_counts_the_forks_of_rollouts_and_names_them_in_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_folder(folder / ".whet")
    anyio.run(record_run, run)
    assert main(["show", "mine"]) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert header[4] == "forks"
    assert {row[4] for row in rows if row[0].startswith("train-")} == {"1"}
    assert main(["show", "mine", "--worst", "--limit", "-1"]) == 2
    assert "invalid limit -1: expected at least 1" in capsys.readouterr().err
    assert main(["show", "mine", "--rollout", "train-000000-000"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert shown.count("fork: edited_history") == 1
    assert "advantage -0.750" in shown


def test_show_names_the_checkpoints_that_are_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_folder(folder / ".whet")
    anyio.run(record_run, run)
    assert main(["show", "mine"]) == 0
    assert "checkpoints" not in capsys.readouterr().out
    (run.checkpoints / "step-000001").mkdir()
    (run.checkpoints / "step-000001.partial").mkdir()
    assert main(["show", "mine"]) == 0
    line = "checkpoints in .whet/runs/mine/checkpoints: step-000001 (after step 2)\n"
    assert line in capsys.readouterr().out
    assert main(["show", "mine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert found == {"2": ".whet/runs/mine/checkpoints/step-000001"}


@pytest.mark.parametrize(("ends", "state"), [(False, "running"), (True, "failed, worker_left")])
def test_show_takes_a_rollout_that_runs_or_waits_for_another_attempt(
    ends: bool, state: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_folder(folder / ".whet")
    anyio.run(begin_rollout, run, ends)
    assert main(["show", "mine", "--rollout", "begun"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"begun.1  {state}")
    assert "task  the task" in shown


async def begin_rollout(run: RunFolder, ends: bool) -> None:
    async with SQLiteStore(run.store) as store:
        await store.enqueue([Rollout(id="begun", group="g", task="the task", max_attempts=2)])
        attempt = await store.claim("w", lease_s=MINUTE, wait_s=0)
        assert attempt is not None
        if ends:
            failure = Failure(kind=FailureKind.WORKER_LEFT, message="gone")
            await store.finish(attempt.id, Outcome(failure=failure))


@pytest.mark.parametrize("flags", [(), ("--worst",), ("--failed",)])
def test_text_of_a_model_cannot_control_the_terminal_that_shows_it(
    flags: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b]0;title b\u202e"
    anyio.run(partial(record_run, make_folder(folder / ".whet", text=text), text=text))
    assert main(["show", "mine", *flags]) == 0
    shown = capsys.readouterr().out
    assert "a␛]0;title b\ufffd" in shown
    assert not {"\x1b", "\u202e"} & set(shown)


def test_show_says_how_many_rollouts_it_leaves_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anyio.run(record_run, make_folder(folder / ".whet"))
    assert main(["show", "mine", "--failed"]) == 0
    assert "these are" not in capsys.readouterr().out
    assert main(["show", "mine", "--failed", "--limit=1"]) == 0
    assert "these are 1 of 2 rollouts: a higher limit shows more" in capsys.readouterr().out
    assert main(["show", "mine", "--worst"]) == 0
    assert "these are 3 of 8 rollouts" in capsys.readouterr().out


def test_failures_are_of_the_whole_run_or_of_one_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anyio.run(record_run, make_folder(folder / ".whet"))
    found = {flag: list_shown(capsys, "--failed", *flag) for flag in ((), ("--step=2",))}
    assert found == {
        (): ["train-000000-003", "train-000002-003"],
        ("--step=2",): ["train-000002-003"],
    }
    assert main(["show", "mine", "--step=1", "--rollout=train-000002-003"]) == 2
    assert "a step and a rollout exclude each other" in capsys.readouterr().err


def list_shown(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    assert main(["show", "mine", "--json", *flags]) == 0
    return [attempt["rollout"] for attempt in json.loads(capsys.readouterr().out)["attempts"]]


def test_a_run_without_a_finished_step_shows_its_ended_rollouts(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dev(folder, model, "silent", capsys, code=1)
    assert main(["show"]) == 0
    assert "dev-000.1  reward 1" in capsys.readouterr().out
    run = make_folder(folder / ".whet")
    anyio.run(partial(record_run, run, steps=0))
    assert main(["show", "mine"]) == 0  # its rollout waits
    assert "no such rollouts" in capsys.readouterr().out


def make_attempt(number: int, failure: Failure | None = None) -> AttemptRecord:
    return AttemptRecord(
        id=AttemptId(f"a.{number}"), number=number, worker="w", started=1.0, ended=2.0,
        status=Status.FAILED if failure else Status.SUCCEEDED, reward=None if failure else 1.0,
        failure=failure, resources={}, late=(),
    )  # fmt: skip


def draw(view: AttemptView) -> str:
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(draw_attempt(view))
    return console.export_text()


def test_an_attempt_is_shown_with_the_failures_of_those_before_it() -> None:
    failure = Failure(kind=FailureKind.AGENT, message="the agent raised: OSError: locked")
    earlier, last = make_attempt(1, failure), make_attempt(2)
    view = AttemptView(Rollout(id="a", task=None, group="a"), last, (), (), (), (earlier,))
    assert "attempt 1  failed, agent: the agent raised: OSError: locked" in draw(view)
    [found] = json.loads(json.dumps(view.as_json()))["earlier_failures"]
    assert found["message"] == failure.message


@pytest.mark.parametrize(("mode", "remarked"), [(Mode.TRAIN, True), (Mode.VAL, False)])
def test_temperature_0_is_remarked_in_training_only(mode: Mode, remarked: bool) -> None:
    record = make_attempt(1)
    recorded = call(record.id, "greedy")
    greedy = recorded.generations[0].model_copy(update={"sampling": Sampling(temperature=0)})
    calls = (recorded.model_copy(update={"generations": (greedy,)}),)
    rollout = Rollout(id="a", task=None, group="a", mode=mode)
    shown = draw(AttemptView(rollout, record, calls, (), (), ()))
    assert ("sampled at temperature 0" in shown) is remarked
