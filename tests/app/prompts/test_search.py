"""Searches for prompts: they find a known better one, repeat nothing, and go on after a kill."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import matplotlib
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from whet.app.cli.main import main
from whet.app.evaluation.evaluate import evaluate
from whet.app.prompts.apo import APO
from whet.app.prompts.gepa import GEPA
from whet.app.prompts.saved import load_prompts, read_prompts
from whet.app.prompts.search import PromptSearch
from whet.app.prompts.study import Candidate, Study
from whet.app.train import train
from whet.config import RunConfig
from whet.errors import ConfigError
from whet.io.server import AppServer
from whet.runners.loading import load_function
from whet.store.sqlite import SQLiteStore
from whet.types import Endpoint, Outcome, PromptTemplate

AGENT = """
from collections import Counter
from openai import AsyncOpenAI

runs = Counter()


async def solve(task, llm, prompt_template, rollout):
    prompt = prompt_template.format(question=task["q"])
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": prompt}], max_tokens=4
        )
    runs[task["q"]] += 1
    exploring = 0.1 * (runs[task["q"]] % 2) if rollout.mode == "train" else 0.0
    return 0.5 * ("step by step" in prompt) + 0.2 * task["easy"] + exploring
"""
START = PromptTemplate(template="Answer {question}")
BETTER = "Answer {question} step by step"
TASKS: list[Any] = [{"q": name, "easy": n % 2} for n, name in enumerate("abcd")]


@contextmanager
def reflect(reply: Callable[[int], str]) -> Generator[tuple[Endpoint, list[str]]]:
    """A scripted reflection model: the n-th request gets `reply(n)`."""
    requests: list[str] = []

    async def complete(request: Request) -> JSONResponse:
        body = await request.json()
        requests.append(body["messages"][0]["content"])
        return JSONResponse({"choices": [{"message": {"content": reply(len(requests))}}]})

    server = AppServer(
        Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    )
    yield Endpoint(base_url=f"{server.url}/v1", api_key="x", model="m"), requests
    server.close()


def write_agent(folder: Path) -> Any:
    file = folder / "agent.py"
    file.write_text(AGENT)
    return load_function(f"{file}:solve")


def good(number: int) -> str:
    return f"```\n{BETTER}\n```"


class FakeStudy(Study):
    """A study whose rollouts end at once, with a reward by their prompt."""

    def __init__(self, store: SQLiteStore, folder: Path, reply: Callable[[int], str]) -> None:
        self.replies: list[str] = []

        async def ask(text: str) -> str:
            self.replies.append(text)
            return reply(len(self.replies))

        super().__init__(
            store=store,
            folder=folder,
            config=RunConfig(),
            tasks=TASKS,
            held_out=TASKS,
            prompts={"prompt": START.template},
            ask=ask,
        )


async def work(store: SQLiteStore) -> None:
    """Claim rollouts and reward them by their prompt."""
    while True:
        attempt = await store.claim("w", lease_s=60, wait_s=30)
        if attempt is not None:
            value: Any = (await store.get("prompt", attempt.resources["prompt"])).value
            task: Any = attempt.rollout.task
            better = "step by step" in value["template"]
            await store.finish(attempt.id, Outcome(reward=0.5 * better + 0.2 * task["easy"]))


def search_with_fakes(
    search: PromptSearch, folder: Path, reply: Callable[[int], str]
) -> tuple[Sequence[Candidate], FakeStudy]:
    async def run() -> tuple[Sequence[Candidate], FakeStudy]:
        async with SQLiteStore(folder / "store.db") as store:
            study = FakeStudy(store, folder, reply)
            await store.publish("prompt", START.model_dump())
            found: list[Candidate] = []
            async with anyio.create_task_group() as group:
                group.start_soon(work, store)
                found += await search.optimize(study)
                group.cancel_scope.cancel()
            return found, study

    return anyio.run(run)


SEARCHES = {
    "gepa": lambda: GEPA(budget=40, minibatch=2),
    "apo": lambda: APO(rounds=1, beam=2, branches=1, minibatch=2),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_finds_a_known_better_prompt(name: str, tmp_path: Path) -> None:
    found, study = search_with_fakes(SEARCHES[name](), tmp_path, good)
    assert found[0].prompts == {"prompt": START.template}
    assert found[0].mean == pytest.approx(0.1)
    best = max(found, key=lambda candidate: candidate.mean)
    assert best.prompts == {"prompt": BETTER}
    assert best.mean == pytest.approx(0.6)
    assert best.parents == (0,)
    assert "reward 0" in "".join(study.replies)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_is_started_again_runs_and_asks_nothing_twice(
    name: str, tmp_path: Path
) -> None:
    before, first = search_with_fakes(SEARCHES[name](), tmp_path, good)

    def refuse(number: int) -> str:
        raise AssertionError("it was asked before")

    after, second = search_with_fakes(SEARCHES[name](), tmp_path, refuse)
    assert after == before
    assert second.replies == []
    assert second.rollouts == first.rollouts


@pytest.mark.parametrize(
    ("reply", "reason"),
    [("Answer", "must keep the placeholders {question}"), ("{a.b} {question}", "placeholder")],
)
def test_a_prompt_that_cannot_be_formatted_scores_nothing(
    reply: str, reason: str, tmp_path: Path
) -> None:
    found, study = search_with_fakes(
        APO(rounds=1, beam=1, branches=1), tmp_path, lambda number: f"```\n{reply}\n```"
    )
    assert [candidate.mean for candidate in found] == [pytest.approx(0.1), 0.0]
    assert reason in study.check({"prompt": reply})


def test_prompts_are_read_from_runs_and_files(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text('{"system": {"template": "Hi {x}"}}')
    (tmp_path / "plain.txt").write_text("Answer {question}\n")
    assert load_prompts(tmp_path) == {"system": {"template": "Hi {x}"}}
    named = read_prompts([f"base={tmp_path / 'plain.txt'}"])
    assert named == {"base": {"prompt": {"template": "Answer {question}"}}}
    with pytest.raises(ConfigError, match="optimize-prompt"):
        load_prompts(tmp_path / "missing.txt")


COMMAND = "optimize-prompt {agent} --tasks {tasks} --prompt {prompt} --dir {dir} --name search"


@pytest.mark.slow
def test_a_killed_search_goes_on_and_the_four_are_compared(tmp_path: Path) -> None:
    agent = write_agent(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    (tmp_path / "start.txt").write_text(START.template)
    command = COMMAND.format(
        agent=f"{tmp_path / 'agent.py'}:solve",
        tasks=tmp_path / "tasks.jsonl",
        prompt=tmp_path / "start.txt",
        dir=tmp_path / "whet",
    ).split()
    processes: list[subprocess.Popen[bytes]] = []

    def reply(number: int) -> str:
        if number == 2:  # the first run dies while it waits for its second reflection
            processes[0].send_signal(signal.SIGKILL)
        return "```\nPlease answer {question}\n```" if number == 1 else good(number)

    with reflect(reply) as (endpoint, requests):
        where = ["--reflection-endpoint", endpoint.base_url, "--reflection-model", "m"]
        whole = [sys.executable, "-m", "whet", *command, *where, "--budget", "60", "--json"]
        processes.append(subprocess.Popen(whole, env=os.environ, stdout=subprocess.DEVNULL))
        assert processes[0].wait() == -signal.SIGKILL
        done = subprocess.run(whole, env=os.environ, stdout=subprocess.PIPE, check=True)
    result = json.loads(done.stdout)
    assert result["prompts"] == {"prompt": BETTER}
    assert requests.count(requests[0]) == 1  # answered before the kill, and not asked again
    assert (tmp_path / "whet/runs/search/candidates.png").stat().st_size > 1000

    prompts = load_prompts(tmp_path / "whet/runs/search")
    settings: dict[str, Any] = {"dir": str(tmp_path / "whet"), "quiet": True}
    small: dict[str, Any] = {"steps": 1, "tasks_per_step": 2, "group_size": 4, **settings}
    start = {"prompt": START}
    train(agent, TASKS, resources=start, name="weights", **small)
    train(agent, TASKS, resources=prompts, name="both", **small)
    runs = tmp_path / "whet/runs"
    compared = evaluate(
        agent,
        TASKS,
        {"base": "tiny", "prompt": "tiny", "weights": f"{runs}/weights", "both": f"{runs}/both"},
        prompts={"": start, "prompt": prompts, "both": prompts},
        **settings,
    )
    means = {name: e.mean for name, e in compared.comparison.measures["greedy"].items() if e}
    expected = {"base": 0.1, "prompt": 0.6, "weights": 0.1, "both": 0.6}
    assert means == {name: pytest.approx(value) for name, value in expected.items()}
    gain = compared.comparison.gains["greedy"]["prompt"]
    assert gain is not None
    assert gain.ci95 is not None
    assert gain.ci95[0] <= 0.5 <= gain.ci95[1]


class OnlyStart(PromptSearch):
    """Evaluates the prompts to start from."""

    async def optimize(self, study: Study) -> Sequence[Candidate]:
        tasks = range(len(study.held_out))
        found = await study.evaluate(study.prompts, tasks, "held_out")
        return [Candidate(study.prompts, (), [each.reward for each in found], study.rollouts)]


def test_a_search_that_is_started_again_with_other_tasks_is_refused(
    tmp_path: Path, model: Path
) -> None:
    agent = write_agent(tmp_path)
    settings: dict[str, Any] = {"dir": str(tmp_path), "name": "x", "model": str(model)}

    def search(tasks: Sequence[Any]) -> float:
        resources = {"prompt": START}
        found = OnlyStart().run(agent, tasks, resources=resources, quiet=True, **settings)
        return found.candidates[0].mean

    backend = matplotlib.get_backend()
    matplotlib.use("svg")  # such as that of a notebook
    try:
        assert search(TASKS[:1]) == 0.0
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use(backend)
    assert search(TASKS[:1]) == 0.0
    with pytest.raises(ConfigError, match="tasks are not those the run 'x' was started with"):
        search(TASKS[1:2])


def test_a_budget_is_refused_that_an_optimizer_does_not_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("import whet\nclass Mine(whet.PromptSearch):\n    pass\n")
    (tmp_path / "tasks.jsonl").write_text('"a"\n')
    (tmp_path / "start.txt").write_text("Answer {question}")
    flags = [f"--tasks={tmp_path / 'tasks.jsonl'}", f"--prompt={tmp_path / 'start.txt'}"]
    flags += [f"--optimizer={tmp_path / 'mine.py'}:Mine", "--budget=10"]
    assert main(["optimize-prompt", "a.py:f", *flags]) == 2
    assert "--budget is for gepa and apo" in capsys.readouterr().err
