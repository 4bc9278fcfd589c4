"""Judges in runs: groups that are ranked, the base model as a judge, and `whet rescore`."""

import hashlib
import json
from pathlib import Path

import anyio
import httpx
import pytest

import whet
from support.servers.judge_server import rank_by, serve_judge
from whet.app.cli.main import main
from whet.app.run_folder import RunFolder
from whet.errors import ConfigError
from whet.store import DEFAULT_RUN
from whet.types import Trajectory

SMALL = {"tasks_per_step": 2, "group_size": 4, "steps": 1, "trainer": {"weights": "full"}}


async def ask(llm: whet.Endpoint, task: str, model: str) -> str:
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": task}]}
    async with httpx.AsyncClient(base_url=llm.base_url + "/", verify=False) as client:
        headers = {"authorization": f"Bearer {llm.api_key}"}
        reply = await client.post("chat/completions", headers=headers, json=body)
    return reply.json()["choices"][0]["message"]["content"]


async def agent(task: str, llm: whet.Endpoint) -> float:
    await ask(llm, task, llm.model)
    return 0.0


def size(answer: str) -> float:
    return int.from_bytes(hashlib.blake2b(answer.encode(), digest_size=6).digest())


def train(folder: Path, model: Path, judge: object, **settings: object) -> whet.Result:
    return whet.train(
        agent,
        ["say one", "say two"],
        quiet=True,
        dir=str(folder),
        name="run",
        model=str(model),
        judge=judge,  # pyright: ignore[reportArgumentType]
        **{**SMALL, **settings},  # pyright: ignore[reportArgumentType]
    )


def read(
    folder: Path, model: str = DEFAULT_RUN, *, spans: bool = False
) -> list[tuple[Trajectory, int]]:
    async def load() -> list[tuple[Trajectory, int]]:
        async with RunFolder(folder).open_store(model) as store:
            ids = [record.rollout.id for record in await store.rollouts()]
            found = await store.trajectories(ids)
            return [(t, len(await store.spans(t.attempt.id)) if spans else 0) for t in found]

    return anyio.run(load)


def test_a_judge_ranks_the_groups_of_a_run_and_its_cost_is_reported(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_judge(rank_by(size)) as server:
        judge = whet.judge("better", base_url=server.url, model="m", samples=2, cache=None)
        result = train(tmp_path, model, judge)
        requests = len(server.requests)
        again = train(tmp_path, model, judge, resume=True)
        assert len(server.requests) == requests == 4
    metrics = result.steps[0].metrics
    assert metrics["rows"] == 8  # the agent's own rewards are equal: the judge's made a signal
    assert (metrics["judge/requests"], metrics["judge/tokens"]) == (4, 480)
    assert main(["show", "run", f"--dir={tmp_path}"]) == 0
    mean = f"the mean of the step is {metrics['reward']:.2f}"  # each rollout's own reward is 0
    assert mean in " ".join(capsys.readouterr().out.split())
    assert main(["rollouts", "run", f"--dir={tmp_path}"]) == 0
    assert "without the scores of the judge" in " ".join(capsys.readouterr().out.split())
    assert (metrics["judge/disagreement"], metrics["judge/failed"]) == (0, 0)
    assert metrics["judge/score"] == pytest.approx(0.5)
    assert again.steps == result.steps
    stored = read(result.run, spans=True)
    assert all(len(t.calls) == 1 and t.reward == 0 and spans == 1 for t, spans in stored)


@pytest.mark.slow
def test_a_judge_that_fails_leaves_the_rewards_of_its_group(tmp_path: Path, model: Path) -> None:
    async def own(task: str, llm: whet.Endpoint) -> float:
        return size(await ask(llm, task, llm.model))

    with serve_judge(lambda prompt, number: "no") as server:
        judge = whet.judge("better", base_url=server.url, model="m", tries=1, cache=None)
        result = whet.train(
            own, ["say one", "say two"], judge=judge, quiet=True, dir=str(tmp_path),
            model=str(model), **SMALL,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
    metrics = result.steps[0].metrics
    assert (metrics["judge/failed"], metrics["failed_rollouts"], metrics["rows"]) == (2, 0, 8)
    assert "judge/score" not in metrics


@pytest.mark.slow
def test_the_base_model_of_the_run_is_a_judge_that_is_never_trained(
    tmp_path: Path, model: Path
) -> None:
    grades: list[str] = []

    async def asks_both(task: str, llm: whet.Endpoint) -> float:
        answer = await ask(llm, task, llm.model)
        grades.append(await ask(llm, answer or "nothing", "judge"))
        return size(answer)

    result = whet.train(
        asks_both, ["say one", "say two"], quiet=True, dir=str(tmp_path), model=str(model),
        gateway={"judge": "base"}, **SMALL,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    assert len(grades) == 8
    assert all(len(trajectory.calls) == 1 for trajectory, _ in read(result.run))
    assert result.steps[0].metrics["calls"] == 8


@pytest.mark.slow
def test_the_judge_of_an_agent_scores_its_training_and_its_evaluation(
    tmp_path: Path, model: Path
) -> None:
    grades: list[float] = []

    def grade(prompt: str, number: int) -> str:
        grades.append(size(prompt) % 11 / 10)
        return json.dumps({"scores": {"1": grades[-1] * 10}})

    with serve_judge(grade) as server:
        judge = whet.judge("better", base_url=server.url, model="m", cache=None)

        async def judged(task: str, llm: whet.Endpoint) -> float:
            answer = await ask(llm, task, llm.model)
            return (await judge.score(answer, task=task)).score

        trained = whet.train(
            judged, ["say one", "say two"], quiet=True, dir=str(tmp_path), name="run",
            model=str(model), **SMALL,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        assert sorted(grades) == pytest.approx(sorted(t.reward or 0 for t, _ in read(trained.run)))
        grades.clear()
        compared = whet.evaluate(
            judged,
            ["say three", "say four"],
            {"base": str(model), "trained": str(trained.run)},
            quiet=True,
            dir=str(tmp_path),
            evaluation={"samples": 1},
        )
    assert len(grades) == 8  # two tasks, two models, greedy and sampled
    lines = [json.loads(line) for line in compared.results.read_text().splitlines()]
    assert sorted(line["reward"] for line in lines) == pytest.approx(sorted(grades))
    for name in ("base", "trained"):
        stored = read(compared.run, name, spans=True)
        assert [(len(t.calls), spans) for t, spans in stored] == [(1, 1)] * 4


def test_an_evaluation_has_the_model_of_gateway_judge(tmp_path: Path, model: Path) -> None:
    grades: list[str] = []

    async def asks_both(task: str, llm: whet.Endpoint) -> float:
        grades.append(await ask(llm, await ask(llm, task, llm.model) or "nothing", "judge"))
        return 1.0

    def evaluate(judge: str) -> whet.Evaluation:
        return whet.evaluate(
            asks_both, ["say one"], {"base": str(model)}, quiet=True, dir=str(tmp_path),
            gateway={"judge": judge}, evaluation={"samples": 1},
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"gateway\.judge 'base' could be any of several models"):
        evaluate("base")
    compared = evaluate(str(model))
    assert len(grades) == 2
    assert all(len(trajectory.calls) == 1 for trajectory, _ in read(compared.run, "base"))


def test_a_judge_without_a_model_is_refused_at_the_start(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"no base_url: give it one, or set gateway\.judge"):
        train(tmp_path, model, whet.judge("better"))
    assert not list(tmp_path.glob("runs/*"))


REWARDS = """
import whet
def length(task, answer, reward):
    assert reward == 0 and task.startswith("say")
    return len(answer)
async def fails(trajectory):
    raise ValueError("never")
def unknown(x): ...
def takes_all(**values):
    return len(values["answer"]) + len(values)
def ends(answer):
    raise SystemExit(0)
from math import log, sqrt
graded = whet.judge("good", base_url={url!r}, model="m", cache=None)
no_url = whet.judge("good")
"""


def test_rescoring_scores_stored_rollouts_and_changes_nothing(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_judge(rank_by(size)) as server:
        judge = whet.judge("better", base_url=server.url, model="m", cache=None)
        result = train(tmp_path, model, judge)
    before = read(result.run)
    rewards = tmp_path / "rewards.py"
    with serve_judge(lambda prompt, number: '{"scores": {"1": 3}}') as server:
        rewards.write_text(REWARDS.format(url=server.url))
        command = ("rescore", "run", "--dir", str(tmp_path), "--json", "--reward")
        assert main([*command, f"{rewards}:length"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main([*command, f"{rewards}:graded"]) == 0
        graded = json.loads(capsys.readouterr().out)
    assert (found["rollouts"], found["scored"], found["old"]) == (8, 8, 0)
    lines = [json.loads(line) for line in Path(found["results"]).read_text().splitlines()]
    answers = [t.calls[0].generations[0].message["content"] for t, _ in before]
    assert [line["new"] for line in lines] == [len(str(answer)) for answer in answers]
    assert (graded["scored"], graded["new"]) == (8, pytest.approx(0.3))
    assert read(result.run) == before
    assert main([*command, f"{rewards}:fails"]) == 1
    assert "the reward raised: ValueError: never" in capsys.readouterr().err
    assert main([*command, f"{rewards}:takes_all"]) == 0
    assert json.loads(capsys.readouterr().out)["new"] == found["new"] + 4
    assert main([*command, f"{rewards}:ends"]) == 1
    assert "the reward ended the process" in capsys.readouterr().err
    for name, says in (
        ("unknown", "unknown parameter 'x'"),
        ("sqrt", "unknown parameter 'x'"),
        ("log", "has no signature"),
        ("no_url", "has no base_url"),
    ):
        assert main([*command, f"{rewards}:{name}"]) == 2
        assert says in capsys.readouterr().err
