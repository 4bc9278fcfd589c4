"""Models side by side, through store, gateway and runner."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import whet
from whet.app.cli.main import main
from whet.app.evaluation.trials import plan_trials
from whet.app.run_folder import RunFolder
from whet.config import RunConfig, resolve
from whet.errors import ConfigError
from whet.types import Mode


async def answer_length(task: str, llm: whet.Endpoint) -> float:
    if task == "broken":
        raise KeyError("no such thing")
    body = {"model": llm.model, "max_tokens": 6, "messages": [{"role": "user", "content": task}]}
    async with httpx.AsyncClient(base_url=llm.base_url + "/", verify=False) as client:
        headers = {"authorization": f"Bearer {llm.api_key}"}
        reply = await client.post("chat/completions", headers=headers, json=body)
    reply.raise_for_status()
    return float(len(reply.json()["choices"][0]["message"]["content"] or "") % 2)


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_task_is_run_greedily_and_sampled_and_never_learned_from() -> None:
    config = resolve({"evaluation": {"samples": 2, "temperature": 0.7}})
    trials = plan_trials("before", ["a", "b"], config)

    assert [(t.way, t.rollout.task, t.sample) for t in trials] == [
        ("greedy", "a", 0),
        ("greedy", "b", 0),
        ("sampled", "a", 0),
        ("sampled", "b", 0),
        ("sampled", "a", 1),
        ("sampled", "b", 1),
    ]
    assert [t.rollout.sampling.temperature for t in trials] == [0.0, 0.0, 0.7, 0.7, 0.7, 0.7]
    assert {t.rollout.mode for t in trials} == {Mode.VAL}
    ids = {t.rollout.id for t in trials}
    assert len(ids) == 6
    assert not ids & {t.rollout.id for t in plan_trials("after", ["a"], RunConfig())}


def test_an_evaluation_of_nothing_is_refused() -> None:
    config = resolve({"evaluation": {"samples": 0, "greedy": False}})
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        plan_trials("eval", ["a"], config)


def test_models_are_compared_and_every_result_is_a_line(tmp_path: Path, model: Path) -> None:
    results = tmp_path / "all.jsonl"
    results.write_text('{"run": "another", "model": "x", "rollout": "y"}\n')
    evaluation = whet.evaluate(
        answer_length,
        ["one", "two", "broken", "three"],
        {"base": str(model), "same": str(model)},
        results=results,
        quiet=True,
        dir=str(tmp_path),
        name="compared",
        evaluation={"samples": 4},
        runner={"max_attempts": 1},
    )

    assert list(evaluation.models) == ["base", "same"]
    comparison = evaluation.comparison
    assert comparison.tasks == 4
    assert list(comparison.measures) == ["greedy", "sampled", "pass@1", "pass@2", "pass@4"]
    # The same weights answer the same greedily. The agent's failures count.
    gained = comparison.gains["greedy"]["same"]
    assert gained
    assert (gained.mean, gained.tasks) == (0.0, 4)
    report = evaluation.as_json()
    assert json.loads((tmp_path / "runs/compared/report.json").read_text()) == report
    failures = comparison.as_json()["base"]["failures"]  # pyright: ignore
    assert failures["agent"]["count"] == 5
    assert "KeyError" in failures["agent"]["example"]
    assert evaluation.picture.read_bytes().startswith(b"\x89PNG")

    written = lines(results)
    assert written[0]["run"] == "another"
    ours = [line for line in written if line["run"] == "compared"]
    keys = {(line["model"], line["task"], line["way"], line["sample"]) for line in ours}
    assert len(keys) == len(ours) == 2 * 4 * 5
    failed = [line for line in ours if line["failure"]]
    assert {line["task"] for line in failed} == {2}
    assert {line["reward"] for line in failed} == {None}
    assert len(failed) == 10


def test_rollouts_of_an_evaluation_are_shown_by_model_as_those_of_a_run(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def agent(task: str, llm: whet.Endpoint) -> float:
        if task == "raises":
            raise ValueError("no JSON")
        return float(len(task))

    models = {"base": str(model), "same": str(model)}
    evaluation = whet.evaluate(
        *(agent, ["raises", "ends", "longest"], models),
        quiet=True, dir=str(tmp_path), name="compared", evaluation={"samples": 1},
    )  # fmt: skip
    same = ["compared", "--model=same", "--dir", str(tmp_path)]
    whet.show(evaluation.run, model="base", failed=True)
    shown = capsys.readouterr().out
    assert "eval-greedy-00000.1  failed, agent: the agent raised: ValueError: no JSON" in shown
    assert "Traceback" in shown
    assert "eval-sampled-00000-000.1  failed" in shown
    assert main(["show", *same, "--worst", "--limit=1"]) == 0
    assert capsys.readouterr().out.startswith("eval-greedy-00001.1  reward 4")
    for name in (["eval-sampled-00002-000"], ["compared", "--rollout=eval-sampled-00002-000"]):
        assert main(["show", *name, *same[1:]]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("eval-sampled-00002-000.1  reward 7")
        assert "task  longest" in shown
    assert main(["rollouts", *same, "--status=succeeded", "--order=best", "--limit=2"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert {row.split()[0] for row in rows[:2]} == {"eval-greedy-00002", "eval-sampled-00002-000"}
    assert "all of one rollout: whet show compared --model same --rollout ID" in rows


def test_an_agent_that_raises_is_not_tried_again_and_counts(tmp_path: Path, model: Path) -> None:
    tries: dict[str, int] = {}

    def agent(task: str, llm: whet.Endpoint) -> float:
        tries[task] = tries.get(task, 0) + 1
        if task == "raises" and tries[task] == 1:
            raise ValueError("the model wrote a tool call that is no JSON")
        return 1.0

    evaluation = whet.evaluate(
        agent,
        ["raises", "works"],
        {"base": str(model)},
        quiet=True,
        dir=str(tmp_path),
        evaluation={"samples": 0},
    )
    assert tries == {"raises": 1, "works": 1}
    found = evaluation.comparison.measures["greedy"]["base"]
    assert found
    assert (found.mean, found.tasks) == (0.5, 2)
    assert "ValueError" in str(evaluation.comparison.as_json()["base"])


@pytest.mark.slow
def test_a_finished_evaluation_takes_further_models_and_repeats_nothing(
    tmp_path: Path, model: Path
) -> None:
    ran: list[str] = []

    def agent(task: str, llm: whet.Endpoint) -> float:
        ran.append(task)
        return 1.0

    def evaluate(models: dict[str, str], *, resume: bool) -> whet.Evaluation:
        return whet.evaluate(
            agent, ["a", "b"], models, resume=resume, quiet=True, dir=str(tmp_path), name="grows"
        )

    evaluate({"first": str(model)}, resume=False)
    assert sorted(ran) == ["a", "a", "b", "b"]
    ran.clear()
    grown = evaluate({"second": str(model)}, resume=True)
    assert list(grown.models) == ["first", "second"]
    assert sorted(ran) == ["a", "a", "b", "b"]
    ran.clear()
    again = evaluate({}, resume=True)
    assert again.comparison.as_json() == grown.comparison.as_json()
    assert ran == []
    assert len(lines(again.results)) == 8

    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match="model 'first' had other weights"):
        evaluate({"first": str(other)}, resume=True)
    with pytest.raises(ConfigError, match="exists already"):
        evaluate({"first": str(model)}, resume=False)
    with pytest.raises(ConfigError, match="the tasks are not those"):
        whet.evaluate(agent, ["c"], quiet=True, resume=True, dir=str(tmp_path), name="grows")


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_run_its_model_and_its_checkpoint_score_as_the_run_itself_did(
    tmp_path: Path, model: Path, weights: str
) -> None:
    tasks = [f"task {number}" for number in range(6)]
    trained = whet.train(
        answer_length,
        tasks,
        held_out=tasks,
        quiet=True,
        model=str(model),
        dir=str(tmp_path),
        name="trained",
        steps=2,
        tasks_per_step=2,
        trainer={"weights": weights},
        adam={"lr": 0.01},
    )
    run = RunFolder(trained.run)
    [checkpoint] = run.checkpoints.iterdir()
    evaluation = whet.evaluate(
        answer_length,
        tasks,
        {"run": str(run.path), "model": str(run.model), "checkpoint": str(checkpoint)},
        quiet=True,
        dir=str(tmp_path),
        evaluation={"samples": 0},
    )
    assert trained.comparison
    after = trained.comparison.scores["trained"].greedy
    for scores in evaluation.comparison.scores.values():
        assert scores.greedy == after


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found two models called 'tiny'"):
        whet.evaluate(answer_length, ["a"], ["tiny", "tiny"], dir=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_results_that_cannot_be_written_use_up_no_name(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write to"):
        whet.evaluate(
            answer_length,
            ["a"],
            {"base": str(model)},
            results=tmp_path,
            quiet=True,
            dir=str(tmp_path),
            name="first",
        )
    assert not list((tmp_path / "runs").iterdir())


def test_weights_that_cannot_be_read_use_up_no_name(tmp_path: Path, model: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "missing.safetensors").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        whet.evaluate(
            answer_length, ["a"], {"base": str(broken)}, quiet=True, dir=str(tmp_path), name="first"
        )
    assert not list((tmp_path / "runs").iterdir())


UNCLOSED = """
from openai import AsyncOpenAI

async def solve(task, llm):
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)  # nobody closes it
    messages = [{"role": "user", "content": f"Say {task}."}]
    reply = await client.chat.completions.create(
        model=llm.model, messages=messages, max_tokens=2
    )
    return float(len(reply.choices[0].message.content or ""))
"""


@pytest.mark.slow
def test_clients_that_nobody_closes_make_no_noise(tmp_path: Path, model: Path) -> None:
    (tmp_path / "agent.py").write_text(UNCLOSED)
    (tmp_path / "tasks.jsonl").write_text("".join(f"{n}\n" for n in range(16)))
    flags = ("--tasks=tasks.jsonl", f"--model=random={model}", "--evaluation.samples=4")
    command = [sys.executable, "-m", "whet", "eval", "agent.py:solve", *flags, "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    [results] = tmp_path.glob(".whet/runs/*/results.jsonl")
    assert len(results.read_text().splitlines()) == 16 * 5


def test_prompts_need_models_to_be_named_with_them(tmp_path: Path) -> None:
    prompts: dict[str, dict[str, object]] = {"": {"prompt": {"template": "Say {x}"}}}
    with pytest.raises(ConfigError, match="prompts are for the models they are given with"):
        whet.evaluate(answer_length, ["a"], prompts=prompts, resume=True, dir=str(tmp_path))
