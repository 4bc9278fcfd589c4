"""Runs that fail or train nothing: what is shown, where the reason is kept, the exit code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

import whet
from whet.app.cli.main import main
from whet.errors import ConfigError, RunFailed
from whet.store.sqlite import SQLiteStore
from whet.types import AttemptRecord

AGENTS = """
import httpx, random, whet

async def ask(llm, key=None, url=None, **options):
    body = {"messages": [{"role": "user", "content": "Say x."}], "max_tokens": 4}
    body = {"model": llm.model} | body | options
    key = {"authorization": f"Bearer {key or llm.api_key}"}
    url = url or llm.base_url
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"{url}/chat/completions", json=body, headers=key)
    return reply.raise_for_status().json()["choices"][0]["message"]["content"] or ""

def helper(task):
    return {}["missing"]

async def raises(task, llm):
    await ask(llm)
    return helper(task)

async def half(task, llm):
    await ask(llm)
    if task == "bad":
        helper(task)
    return random.random()

async def zero(task, llm):
    await ask(llm)
    return 0.0

async def greedy(task, llm):
    return len(await ask(llm, temperature=0)) / 10

async def constrained(task, llm):
    await ask(llm, response_format={"type": "json_object"})
    return random.random()

async def fine(task, llm):
    await ask(llm)
    return random.random()

async def seeded(task, llm):
    return float(hash(await ask(llm, seed=1, max_tokens=12)) % 97)

async def other_model(task, llm):
    await ask(llm, model="gpt-4o")
    return 1.0

async def hides_errors(task, llm):
    try:
        await ask(llm, model="gpt-4o")
    except Exception:
        pass
    return 1.0

async def two_rewards(task, llm):
    whet.emit_reward(len(await ask(llm)), key="length")
    return random.random()

async def brackets(task, llm):
    await ask(llm)
    if task == "bad":
        raise ValueError("found [/INST] in [bold]text[/bold] :warning:")
    return random.random()

async def no_reward(task, llm):
    await ask(llm)

async def wrong_key(task, llm):
    await ask(llm, key="sk-mine")
    return 1.0

async def wrong_key_and_url(task, llm):
    try:
        await ask(llm, key="sk-mine", url=llm.base_url.split("/rollout/")[0] + "/v1")
    except Exception:
        pass
    return 1.0
"""
HELPER_LINE = 1 + AGENTS.split("\n").index('    return {}["missing"]')
KEY_ERROR = f"the agent raised: KeyError: 'missing' (bad.py:{HELPER_LINE})"


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bad.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text('"good"\n"bad"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(model: Path, agent: str, *flags: str) -> int:
    sizes = ("--steps=2", "--tasks-per-step=2", "--group-size=2", "--name=it")
    where = ("--tasks=tasks.jsonl", f"--model={model}", "--trainer.weights=full")
    return main(["train", f"bad.py:{agent}", *where, *sizes, *flags])


def attempts(rollout: str, name: str = "it") -> list[AttemptRecord]:
    async def read() -> list[AttemptRecord]:
        async with SQLiteStore(Path(".whet/runs") / name / "store.db") as store:
            return await store.attempts(rollout)

    return anyio.run(read)


def test_a_step_in_which_all_fails_stops_the_run_with_the_reason(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "raises", "--json") == 2
    output, shown = capsys.readouterr()
    assert shown.count(f" failed: {KEY_ERROR}") == 1
    assert "warning: rollout train-00000" in shown
    assert f"every rollout of step 1 failed, 4 of 4, such as: agent: {KEY_ERROR}" in shown
    assert "2/2" not in shown  # nor the second step
    assert "0.00" not in shown.split("1/2")[1].split("\n")[0]
    report = json.loads(Path(".whet/runs/it/report.json").read_text())
    assert report["failures"] == {f"agent: {KEY_ERROR}": 4}
    assert report["rewards"] == [None]
    assert json.loads(output) == report
    assert report["problem"].endswith("fix the agent, then resume the run 'it'")
    again = "whet train bad.py:raises --tasks tasks.jsonl --resume it"
    assert shown.endswith(f"then resume the run 'it': {again}\n")
    assert not Path(".whet/runs/it/model").exists()
    record = attempts("train-000000-000")[-1]
    assert record.failure
    assert record.failure.traceback.startswith("Traceback")
    assert "in raises" in record.failure.traceback
    assert 'return {}["missing"]' in record.failure.traceback
    assert "whet/runners" not in record.failure.traceback


def test_the_reason_of_a_run_in_which_all_fails_is_printed_at_once_in_the_table_and_in_the_error(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert train(model, "raises") == 2
    output, error = capsys.readouterr()
    at_once, table = output.split("failed rollouts by reason")
    assert at_once.count("KeyError: 'missing' (bad.py:") == 1
    assert table.count("KeyError: 'missing'") == 1
    assert error.count(KEY_ERROR) == 1
    assert caplog.messages == ["4 of 4 rollouts failed (train-000000-000 to train-000001-001)"]


def test_a_step_in_which_all_fails_stops_an_overlapped_run(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "raises", "--loop.name=overlapped", "--steps=4") == 2
    shown = capsys.readouterr()
    assert f"every rollout of step 1 failed, 4 of 4, such as: agent: {KEY_ERROR}" in shown.err
    report = json.loads(Path(".whet/runs/it/report.json").read_text())
    assert (report["steps"], report["failed_rollouts"], report["rewards"]) == (1, 4, [None])


def test_a_run_that_stopped_goes_on_once_the_agent_is_fixed(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "raises", "--quiet") == 2
    report = Path(".whet/runs/it/report.json")
    code = main(["train", "bad.py:fine", "--tasks=tasks.jsonl", "--resume=it", "--quiet"])
    assert (code, json.loads(report.read_text())["problem"]) == (0, None)


def test_the_command_after_a_last_step_that_failed_trains_another_one(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "raises", "--quiet", "--steps=1") == 2
    command = capsys.readouterr().err.partition("the run 'it' with more steps: whet ")[2]
    assert command == "train bad.py:raises --tasks tasks.jsonl --resume it --steps 2\n"
    (folder / "bad.py").write_text(AGENTS.replace("return helper(task)", "return random.random()"))
    assert main([*command.split(), "--quiet"]) == 0
    report = json.loads(Path(".whet/runs/it/report.json").read_text())
    assert (report["steps"], report["problem"]) == (2, None)


def test_failures_of_a_part_are_counted_by_reason(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert train(model, "half", "--steps=1") == 0
    shown = capsys.readouterr().out
    assert "failed rollouts by reason" in shown
    assert "KeyError: 'missing' (bad.py:" in shown
    assert (
        "2 of 4 rollouts failed (train-000000-000 to train-000001-001), such as: agent"
        in caplog.text
    )


def test_failures_that_name_the_urls_of_their_attempts_are_counted_as_one_reason(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "other_model", "--steps=1") == 2
    [count, reason] = capsys.readouterr().out.split("failed rollouts by reason")[1].split("│")[1:3]
    assert (count.strip(), reason.split()[:2]) == ("4", ["agent:", "the"])
    assert main(["show", "it", "--failed"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "404 Not Found' for url 'llm.base_url/chat/completions'" in shown
    assert "/attempt/train-000000-000.2/v1" in "".join(shown.split()), "in the traceback"


@pytest.mark.parametrize(
    ("agent", "flags", "cause"),
    [
        ("zero", (), "all rewards of a task are equal"),
        ("greedy", (), "the agent samples at temperature 0"),
        ("constrained", (), "an answer was constrained"),
        ("fine", ("--selection.agents=assistent",), "a call that `selection` leaves out"),
    ],
)
def test_a_run_that_trains_nothing_ends_with_the_cause(
    folder: Path,
    model: Path,
    agent: str,
    flags: tuple[str, ...],
    cause: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert train(model, agent, *flags, "--steps=1") == 2
    assert "step 1 trained nothing: " in caplog.text
    output, shown = capsys.readouterr()
    assert "whet: nothing was trained in step 1: " in shown
    assert cause in shown.split("nothing was trained")[1]
    assert "`whet show .whet/runs/it` as text" in output


def test_an_agent_with_a_seed_of_its_own_trains(folder: Path, model: Path) -> None:
    assert train(model, "seeded", "--steps=1", "--quiet") == 0


def test_failures_of_an_evaluation_are_told_from_those_of_a_step(
    folder: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("--held-out=tasks.jsonl", "--evaluation.samples=0", "--quiet")
    assert train(model, "raises", *flags) == 2
    lines = [line.split(", such as")[0] for line in caplog.messages if "rollouts failed" in line]
    assert lines == [
        "2 of 2 rollouts failed (before-greedy-00000 to before-greedy-00001)",
        "4 of 4 rollouts failed (train-000000-000 to train-000001-001)",
    ]


def test_a_run_that_has_more_steps_is_refused_before_anything_is_printed(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "fine", "--steps=1") == 0
    Path(".whet/runs/it/report.json").unlink()  # as of a run that was stopped
    capsys.readouterr()
    again = ("train", "bad.py:fine", "--tasks=tasks.jsonl", "--resume=it", "--steps=0")
    assert main(again) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "whet: the run has 1 step already, found steps 0: leave it out, or give at least 1\n"
    )


def test_in_python_it_raises(folder: Path, model: Path) -> None:
    async def raises(task: str, llm: whet.Endpoint) -> float:
        raise LookupError(task)

    with pytest.raises(RunFailed, match=r"LookupError: a \(.*test_failures.py:\d+\)"):
        whet.train(raises, ["a"], model=str(model), steps=2, group_size=2, tasks_per_step=1)


def test_the_whole_reason_of_a_failure_is_shown_in_a_narrow_terminal(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", "bad.py:brackets", "--tasks=tasks.jsonl", f"--model={model}"]
    assert main([*command, "--steps=1", "--tasks-per-step=2", "--group-size=2", "--name=it"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    for look in (["show", "it"], ["show", "it", "--failed"], ["rollouts", "it", "--failed"]):
        assert main(look) == 0
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines()[1:])) <= 80  # the first has the path of a model
        reason = "ValueError: found [/INST] in [bold]text[/bold] :warning: (bad.py:"
        assert reason in " ".join(shown.split())


def test_dev_fails_if_every_attempt_did_and_shows_the_line(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["dev", "bad.py:raises", "--tasks=tasks.jsonl", f"--model={model}"]
    assert main(command) == 1
    shown = capsys.readouterr()
    assert KEY_ERROR in shown.out.replace("\n", "")
    assert 'return {}["missing"]' in shown.out
    again = f"whet dev bad.py:raises --tasks tasks.jsonl --model {model}"
    assert shown.out.endswith(f"next: fix the agent, then `{again}`\n")
    assert main([*command, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "in raises" in found["attempts"][0]["failure"]["traceback"]
    command[1] = "bad.py:greedy"
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "sampled at temperature 0" in shown
    train = f"whet train bad.py:greedy --tasks tasks.jsonl --model {model}"
    assert shown.endswith(f"next: `{train}`\n")
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("command", ["dev", "train"])
def test_a_reward_that_nothing_reads_is_named_at_once_with_its_line_and_ends_no_run(
    command: str, processes: int, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--steps=2", "--tasks-per-step=2", "--group-size=2")
    arguments = [command, "bad.py:two_rewards", "--tasks=tasks.jsonl", f"--model={model}"]
    arguments += [f"--runner.processes={processes}", *(sizes if command == "train" else ())]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    lines = (folder / "bad.py").read_text().splitlines()
    [number] = [n for n, line in enumerate(lines, start=1) if "emit_reward" in line]
    assert shown.count("left out of training") == 1
    assert (
        f"warning: a reward is left out of training (bad.py:{number}): unknown key 'length': name "
        "it in algorithm.reward_keys or algorithm.logged_keys"
    ) in shown
    assert main([*arguments, "--algorithm.logged-keys=length"]) == 0
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "dev", "eval"])
def test_the_words_of_an_agent_are_shown_as_they_are(
    command: str, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("bad.py:brackets", "--tasks=tasks.jsonl", f"--model={model}")
    sizes = ("--steps=1", "--tasks-per-step=2", "--group-size=2", "--name=it")
    assert main([command, *where, *(sizes if command == "train" else ())]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    words = "the agent raised: ValueError: found [/INST] in [bold]text[/bold] :warning: (bad.py:"
    assert words in shown
    if command == "train":
        assert main(["show", "it", "--failed"]) == 0
        assert words in " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert main(["rollouts", "it"]) == 0


def test_a_run_without_a_model_names_how_to_see_its_errors(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "no_reward") == 2
    shown = capsys.readouterr().out
    assert "failed: no reward: return a number, or call whet.emit_reward(...)" in shown
    assert "`whet show .whet/runs/it --failed` for errors" in shown
    assert "whet eval" not in shown
    assert "mean reward of steps" not in shown, "an empty curve"


def test_a_run_of_0_steps_reports_that_it_trains_nothing(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "fine", "--steps=0") == 0
    assert "with 0 steps nothing is trained" in capsys.readouterr().out


@pytest.mark.parametrize("agent", ["other_model", "hides_errors"])
def test_a_refused_call_is_not_a_missing_one(
    agent: str, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["dev", f"bad.py:{agent}", "--tasks=tasks.jsonl", f"--model={model}"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "the gateway refused the model calls of rollout dev-00" in shown
    assert "unknown model 'gpt-4o': this endpoint serves" in shown
    assert "the gateway refused every model call" in shown
    assert "no model call reached" not in shown
    assert "base_url=" not in shown, "the advice for a missing call"


def test_a_call_with_a_wrong_key_is_shown_as_a_refused_one(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dev", "bad.py:wrong_key", "--tasks=tasks.jsonl", f"--model={model}"]) == 1
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    reason = "401: the API key is not one of this endpoint: send llm.api_key (in a command"
    assert "the gateway refused the model calls of rollout dev-00" in shown
    assert shown.count(reason) >= 3, "a warning, and each tree"
    assert "the gateway refused every model call: there is nothing to train" in shown
    assert "no model call reached" not in shown


def test_a_call_with_a_wrong_key_and_no_attempt_names_what_to_check(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    main(["dev", "bad.py:wrong_key_and_url", "--tasks=tasks.jsonl", f"--model={model}"])
    assert "a model call was refused with a 401" in caplog.text
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "no model call reached the gateway for this attempt" in shown
    assert "give its client base_url=llm.base_url and api_key=llm.api_key" in shown
    assert "which gets a 401" in shown


def test_an_evaluation_in_which_all_fails_fails(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--tasks=tasks.jsonl", f"--model={model}", "--name=e")
    assert main(["eval", "bad.py:raises", *where]) == 1
    shown = capsys.readouterr()
    assert "every rollout failed" in shown.err
    assert "`whet show .whet/runs/e --failed` for errors" in shown.out
    assert main(["show", ".whet/runs/e", "--failed"]) == 0
    assert 'return {}["missing"]' in capsys.readouterr().out
    assert f"4 evaluation rollouts failed (agent) and count as 0, such as: {KEY_ERROR}" in shown.out


def test_an_evaluation_names_how_to_look_at_it_and_to_add_a_model(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--tasks=tasks.jsonl", f"--model=random={model}", "--name=e", "--results=all.jsonl")
    assert main(["eval", "bad.py:fine", *flags]) == 0
    another = (
        "whet eval bad.py:fine --tasks tasks.jsonl --results all.jsonl --model MODEL --resume e"
    )
    advice = f"`whet view .whet/runs/e` in a browser, `{another}` to compare another model"
    assert capsys.readouterr().out.endswith(f"next: {advice}\n")


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        (
            "import whet, logging; whet.Trainer; log = logging.getLogger('whet.x').warning;"
            "log('seen'); logging.basicConfig(format='%(message)s'); log('once')",
            "warning: seen\nonce",
        ),
        (
            "import sys; from whet.app.cli.main import main; main(['models']);"
            "import logging; logging.getLogger('whet.x').warning('seen');"
            "logging.getLogger('other').warning('not seen')",
            "warning: seen",
        ),
    ],
)
def test_warnings_are_shown_by_default(program: str, shown: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip() == shown


def test_tasks_in_one_array_are_refused(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text('["a", "b"]\n')
    with pytest.raises(ConfigError, match="is one JSON array of 2 values"):
        whet.train(lambda task, llm: 1.0, "tasks.jsonl")


def run_json(capsys: pytest.CaptureFixture[str], *command: str) -> Any:
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_runs_are_listed_shown_and_cleaned(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train(model, "half", "--steps=1", "--quiet") == 0
    assert main(["dev", "bad.py:fine", "--tasks=tasks.jsonl", f"--model={model}"]) == 0
    by_kind = {run["kind"]: run for run in run_json(capsys, "runs")}
    assert (by_kind["train"]["name"], by_kind["train"]["state"]) == ("it", "done")
    assert by_kind["dev"]["state"] == "done"
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["runs"]) == 0
    assert by_kind["dev"]["name"] in capsys.readouterr().out  # whole, to be copied
    assert train(model, "half", "--steps=1", "--resume=it") == 0
    assert "the run has ended: this is its result" in capsys.readouterr().out

    step = run_json(capsys, "show", "it")
    assert step["step"] == 1
    rewarded = [each for each in step["attempts"] if each["reward"] is not None]
    assert len(rewarded) == 2
    assert sum(each["advantage"] for each in rewarded) == pytest.approx(0, abs=1e-6)
    (worst,) = run_json(capsys, "show", "it", "--worst", "--limit=1")["attempts"]
    assert worst["reward"] == min(each["reward"] for each in rewarded)
    assert worst["calls"][0]["answers"]
    failed = run_json(capsys, "show", "it", "--failed")["attempts"]
    assert "in helper" in failed[0]["failure"]["traceback"]

    assert main(["show", "it", "--rollout", worst["rollout"]]) == 0
    shown = capsys.readouterr().out
    assert "advantage  -" in shown
    assert "user  Say x." in shown
    assert main(["show", "it", "--step=2"]) == 2
    assert "the run has steps 1 to 1" in capsys.readouterr().err
    assert main(["show", "nobody"]) == 2

    assert main(["clean"]) == 0
    assert "`--yes` deletes 1 run" in capsys.readouterr().out
    assert main(["clean", "--yes"]) == 0
    assert [run["name"] for run in run_json(capsys, "runs")] == ["it"]
    for look in ("show", "rollouts"):  # without a name the newest run
        assert run_json(capsys, look) == run_json(capsys, look, "it")
    assert main(["rollouts", "--store=http://127.0.0.1:1"]) == 2
    assert "expected the name of a run of the store" in capsys.readouterr().err
    assert main(["clean", "it", "--yes"]) == 0
    assert run_json(capsys, "runs") == []
    assert main(["show"]) == 2
    assert "`whet demo` or `whet train` makes one" in capsys.readouterr().err
