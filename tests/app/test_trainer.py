"""`whet.Trainer` and `whet dev`: few samples without training, and their results."""

import io
import json
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from opentelemetry import trace
from rich.console import Console
from rich.text import Text
from starlette.responses import JSONResponse

import whet
from support.servers.judge_server import serve_judge
from whet.app.cli.main import main
from whet.app.inspection.attempt_view import AttemptView, draw_attempt
from whet.app.run_folder import RunFolder
from whet.errors import ConfigError
from whet.io.genai_spans import PROMPT_IDS, SAMPLED_IDS
from whet.types import (
    Attempt,
    AttemptId,
    AttemptRecord,
    Endpoint,
    Outcome,
    PromptTemplate,
    Rollout,
    Status,
)

SETTINGS: dict[str, Any] = {"steps": 1, "tasks_per_step": 2, "group_size": 2}


async def ask(llm: Endpoint, text: str, part: str = "text") -> str:
    body = {"model": llm.model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    key = {"authorization": f"Bearer {llm.api_key}"}
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"{llm.base_url}/chat/completions", json=body, headers=key)
    result = reply.raise_for_status().json()
    return result["id"] if part == "id" else result["choices"][0]["message"]["content"]


async def agent(task: str, llm: Endpoint, prompt_template: PromptTemplate) -> float:
    if task == "none":
        return 0.5
    with whet.operation("ask"):
        answer = await ask(llm, prompt_template.format(question=task))
    whet.emit_reward(0.25, turn=0)
    if task == "bad":
        raise LookupError("[nothing] found")
    return len(answer) + zlib.crc32(answer.encode()) / 2**32  # differs where answers do


PROMPT = PromptTemplate(template="Say {question}.")


class Counting(whet.Hooks):
    """Counts attempts."""

    ended = 0

    def after(self, attempt: Attempt, outcome: Outcome) -> None:
        self.ended += 1


def test_dev_trains_nothing_and_shows_calls_tokens_spans_and_rewards(
    model: Path, tmp_path: Path
) -> None:
    hooks = Counting()
    trainer = whet.Trainer(
        n_workers=2,
        resources={"prompt": PROMPT},
        hooks=[hooks],
        quiet=True,
        model=str(model),
        dir=str(tmp_path),
    )
    done = trainer.dev(agent, ["good", "bad", "none", "left out"])
    assert hooks.ended == 3
    good, bad, none = done.as_json()["attempts"]  # pyright: ignore[reportGeneralTypeIssues]
    (call,) = good["calls"]
    assert call["messages"] == [{"role": "user", "content": "Say good."}]
    assert 1 <= call["answers"][0]["sampled_tokens"] == good["sampled_tokens"] <= 4
    assert good["prompt_tokens"] == call["prompt_tokens"] > 4
    assert [span["name"] for span in good["spans"]] == ["ask"]
    assert [reward["value"] for reward in good["rewards"]] == [0.25]
    message = "the agent raised: LookupError: [nothing] found (tests/app/test_trainer.py:"
    assert bad["failure"]["message"].startswith(message)
    assert none["calls"] == []
    assert not list((done.run / "checkpoints").iterdir())
    console = Console(width=120, record=True, file=io.StringIO())
    for view in done.attempts:
        console.print(draw_attempt(view))
    shown = console.export_text()
    for line in (
        "dev-000.1  reward ",
        "1 call, ",
        "user  Say good.",
        "reward  reward = 0.25 for turn 0",
        "dev-001.1  failed, agent: the agent raised: LookupError: [nothing] found",
        "no model call reached the gateway for this attempt: there is nothing to train",
    ):
        assert line in shown


def test_a_reward_of_0_is_not_shown_as_a_success() -> None:
    def style(reward: float) -> str:
        rollout = Rollout(id="a", task=None, group="a")
        record = AttemptRecord(
            id=AttemptId("a.1"), number=1, worker="w", status=Status.SUCCEEDED, started=1.0,
            ended=2.0, reward=reward, failure=None, resources={}, late=(),
        )  # fmt: skip
        tree = draw_attempt(AttemptView(rollout, record, (), (), (), ()))
        assert isinstance(tree.label, Text)
        return str(tree.label.spans[-2].style)

    assert (style(0.0), style(0.5)) == ("bold", "bold green")


def test_an_algorithm_is_named_by_a_string(model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = SETTINGS | {"quiet": True, "dir": str(tmp_path)}
    settings |= {"model": str(model), "resources": {"prompt_template": PROMPT}}
    result = whet.train(agent, ["good", "well"], algorithm="rloo", **settings)
    assert RunFolder(result.run).read_config().algorithm.name == "rloo"
    assert result.total("rollouts") == 4
    with pytest.raises(ConfigError, match="unknown algorithm 'rlo', perhaps 'rloo'"):
        whet.train(agent, ["good"], algorithm="rlo", **settings)


async def traced(task: str, llm: Endpoint) -> float:
    tracer = trace.get_tracer("sdk")
    for name in ("first", "second"):
        with tracer.start_as_current_span(name) as span:
            span.set_attribute("gen_ai.operation.name", "chat")
            id = await ask(llm, f"{task} {name}", part="id")
            if name == "first":
                span.set_attribute("gen_ai.response.id", id)
    return 1.0


def test_dev_shows_the_spans_of_an_sdk_with_the_calls_they_are_about(
    model: Path, tmp_path: Path
) -> None:
    settings: Any = {"model": str(model), "dir": str(tmp_path)}
    trainer = whet.Trainer(tracer="otel", n_workers=2, quiet=True, **settings)
    done = trainer.dev(traced, ["a", "b"])
    for attempt in done.as_json()["attempts"]:  # pyright: ignore[reportGeneralTypeIssues]
        first, second = [call["id"] for call in attempt["calls"]]
        assert [(span["name"], span["call"], span["call_by"]) for span in attempt["spans"]] == [
            ("first", first, "response id"),
            ("second", second, "time"),
        ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw_attempt(done.attempts[0]))
    shown = console.export_text()
    assert "ms  call 1 by response id" in shown
    assert "ms  call 2 by time" in shown


async def ask_traced(llm: Endpoint) -> str:
    """Ask as an instrumented client does: its span names the reply and the server."""
    address = urlsplit(llm.base_url)
    with trace.get_tracer("sdk").start_as_current_span("chat") as span:
        reply = await ask(llm, "How much?", part="id")
        span.set_attributes({"gen_ai.operation.name": "chat", "gen_ai.response.id": reply})
        span.set_attributes({"server.address": address.hostname, "server.port": address.port})
    return reply


def test_a_rollout_that_makes_some_of_its_calls_at_another_server_is_reported_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def own_calls(task: str, llm: Endpoint) -> float:
        return float(len(await ask_traced(llm) + await ask_traced(llm)))

    reply = {"id": "chatcmpl-0", "choices": []}
    with serve_judge(lambda prompt, number: JSONResponse(reply)) as server:

        async def other_calls(task: str, llm: Endpoint) -> float:
            other = llm.model_copy(update={"base_url": server.url, "api_key": "another"})
            return float(len(await ask_traced(llm) + await ask_traced(other)))

        trainer = whet.Trainer(tracer="otel", model=str(model), dir=str(tmp_path))
        trainer.dev(own_calls, ["a", "b"])
        assert "warning" not in capsys.readouterr().out
        done = trainer.dev(other_calls, ["a", "b"])
    shown = " ".join(capsys.readouterr().out.split())
    assert [len(view.calls) for view in done.attempts] == [1, 1]
    assert shown.count("made only some of its model calls at the gateway") == 1
    assert f"went to {server.url.removeprefix('http://').removesuffix('/v1')}" in shown
    assert "base_url=llm.base_url" in shown


def samples_beside_the_gateway(task: str, llm: Endpoint) -> float:
    with trace.get_tracer("sdk").start_as_current_span("chat") as span:
        span.set_attributes({PROMPT_IDS: [1, 2], SAMPLED_IDS: [3]})
    return 1.0


def test_dev_finds_no_problem_in_calls_that_only_spans_have_the_tokens_of(
    model: Path, tmp_path: Path
) -> None:
    settings: Any = {"model": str(model), "dir": str(tmp_path)}
    done = whet.Trainer(tracer="otel", quiet=True, **settings).dev(
        samples_beside_the_gateway, ["a"]
    )
    [view] = done.attempts
    assert (view.calls, done.problem) == ((), None)


def test_the_command_shows_the_same_as_json(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "plain.py").write_text("def solve(task, llm):\n    return task['n']\n")
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    monkeypatch.chdir(tmp_path)
    for command in (["dev"], ["train", "--debug"]):
        line = [*command, "plain.py:solve", "--tasks", "tasks.jsonl", "--samples", "1", "--json"]
        assert main([*line, "--model", str(model)]) == 1
        found = json.loads(capsys.readouterr().out)
        assert [attempt["reward"] for attempt in found["attempts"]] == [1.0]
        assert "made no model call" in found["problem"]
    assert main(["dev", "plain.py:solve", "--tasks", "tasks.jsonl", "--samples", "0"]) == 2
    assert "invalid --samples 0: expected at least 1" in capsys.readouterr().err


def test_fit_is_train_with_hooks_and_resources(model: Path, tmp_path: Path) -> None:
    hooks = Counting()
    trainer = whet.Trainer(
        algorithm={"name": "grpo", "credit": "turn"},
        n_workers=4,
        resources={"prompt": PROMPT},
        hooks=[hooks],
        quiet=True,
        model=str(model),
        dir=str(tmp_path),
        evaluation={"samples": 0},
        **SETTINGS,
    )
    result = trainer.fit(agent, ["a", "b"], val_data=["c"])
    assert len(result.steps) == 1
    assert result.comparison.tasks == 1
    assert hooks.ended == 4 + 2
    config = json.loads((result.run / "config.json").read_text())
    assert (config["runner"]["concurrency"], config["algorithm"]["name"]) == (4, "grpo")


def test_fit_runs_a_function_that_is_an_algorithm(model: Path, tmp_path: Path) -> None:
    @whet.algorithm
    def count(tasks: list[str], held_out: list[str], resources: dict[str, int]) -> object:
        return len(tasks), len(held_out), resources

    trainer = whet.Trainer(
        algorithm=count,
        resources={"prompt": PROMPT},
        quiet=True,
        model=str(model),
        dir=str(tmp_path),
    )
    assert trainer.fit(agent, ["a", "b"], val_data=["c"]) == (2, 1, {"prompt": 1})


def test_what_cannot_be_done_is_refused_before_there_is_a_run(model: Path, tmp_path: Path) -> None:
    place: Any = {"model": str(model), "dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"n_workers and runner\.concurrency are one"):
        whet.Trainer(n_workers=2, runner={"concurrency": 3})
    with pytest.raises(ConfigError, match=r"tracer and runner\.tracer are one setting"):
        whet.Trainer(tracer="otel", runner={"tracer": "otel"})
    with pytest.raises(ConfigError, match="tracer is set where agents run"):
        whet.train(traced, ["a"], tracer="otel", store="http://127.0.0.1:9", **place)
    with pytest.raises(ConfigError, match="'otel' or 'openai-agents'"):
        whet.train(traced, ["a"], tracer="zipkin", **place)
    with pytest.raises(ConfigError, match="takes prompt_template, but its rollout has none"):
        whet.train(agent, ["a"], **place)
    with pytest.raises(ConfigError, match="unknown algorithm 'rlo', perhaps 'rloo'"):
        whet.train(traced, ["a"], algorithm="rlo", **place)
    with pytest.raises(ConfigError, match="name 'policy' is reserved"):
        whet.train(agent, ["a"], resources={"policy": 1}, **place)
    with pytest.raises(ConfigError, match="'x' is object: expected a JSON value"):
        whet.train(agent, ["a"], resources={"x": object()}, **place)
    with pytest.raises(ConfigError, match=r"^held_out\[0\]\['x'\] is of type set: expected a JSON"):
        whet.train(traced, ["a"], held_out=[{"x": {1}}], **place)
    with pytest.raises(ConfigError, match="import an agent by its name"):
        whet.train(lambda task: 1.0, ["a"], runner={"processes": 2}, **place)
    distributed: Any = {"hooks": [Counting()], "store": "http://127.0.0.1:1", **place}
    with pytest.raises(ConfigError, match="hooks are called where agents run"):
        whet.train(agent, ["a"], resources={"prompt": PROMPT}, **distributed)
    assert not list(tmp_path.iterdir())
