"""The CrewAI flow in its own environment: dev run, a step of training, a killed evaluation."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from integrations.sdks.environments import python_of
from support.runs.commands import EXAMPLES, at_work, environment, free_store, report, run
from whet.app.evaluation.model_sources import LocalModel, read_models

pytestmark = pytest.mark.slow

TRAIN = "twenty_questions/train.py"
EVALUATE = "twenty_questions/evaluate.py"
PATIENCE_S = 120


@pytest.fixture(scope="module")
def crewai() -> Path:
    return python_of("crewai")


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen a few games: it talks, and does not play well."""
    folder = tmp_path_factory.mktemp("warmup")
    output = run(TRAIN, "warmup", "--dir", str(folder), "--games", "320")
    assert "held-out loss" in output
    return folder / "runs" / "twenty-questions-warmup" / "model"


def test_a_dev_run_shows_games_from_their_recorded_tokens(player: Path, crewai: Path) -> None:
    output = run(TRAIN, "dev", "--model", str(player), "--runner-python", str(crewai))
    assert "4 of 4 games reached their end" in output
    assert "sampled tokens recorded" in output


def test_a_runner_with_crewai_feeds_a_step_of_training(
    player: Path, crewai: Path, tmp_path: Path
) -> None:
    place = ("--dir", str(tmp_path), "--store", free_store(), "--turns", "4")
    with (
        at_work(TRAIN, "store", *place, log=tmp_path / "store.log"),
        at_work(TRAIN, "serve", *place, log=tmp_path / "serve.log"),
        at_work(TRAIN, "runner", *place, python=crewai, log=tmp_path / "runner.log"),
    ):
        run(TRAIN, "algo", *place, "--model", str(player), "--steps", "1", "--words", "8")
    learned = report(tmp_path, "twenty-questions")
    assert learned["steps"] == 1
    assert learned["failed_rollouts"] == learned["unproven_generations"] == 0
    assert learned["trained_tokens"] > 0
    assert learned["rows"] == learned["trained_rollouts"]  # a game is one row
    run_folder = tmp_path / "runs" / "twenty-questions"
    [found] = read_models([f"player={run_folder}"], None, print)  # though its store is elsewhere
    assert isinstance(found, LocalModel)
    assert found.folder == run_folder / "model"


def test_an_evaluation_that_is_killed_goes_on_and_is_compared(
    player: Path, crewai: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    few = ("--games", "1", "--turns", "4", "--concurrency", "2")
    with endpoint(player, tmp_path / "endpoint.log") as where:
        command = [crewai, EXAMPLES / EVALUATE, "--model", "policy", *few, "--output"]
        killed = subprocess.Popen([*command, first], env=where, stdout=subprocess.DEVNULL)
        wait_for(lambda: first.exists() and len(first.read_bytes().splitlines()) >= 5)
        killed.kill()
        killed.wait()
        kept = first.read_text()
        assert 0 < len(kept.splitlines()) < 60
        output = evaluated([*command, first], where)
        assert first.read_text().startswith(kept[: kept.rfind("\n") + 1])
        words = [json.loads(line)["word"] for line in first.read_text().splitlines()]
        assert len(words) == len(set(words)) == 60
        assert f"{len(kept.splitlines())} games are in" in output
        second.write_text(first.read_text())
        again = evaluated([*command, second, "--against", first], where)
    assert "60 games are in" in again
    assert f"+0.000 [+0.000, +0.000] to {first}" in again


HELPED = """
import asyncio
from flow import helper_for
from game import Fact

async def main():
    helper = helper_for([])
    print(await helper.answer("Is it alive?", "owl"))
    print(await helper.search([Fact("Is it alive?", "yes")]))

asyncio.run(main())
"""


def test_any_endpoint_may_answer_and_search(crewai: Path) -> None:
    questions: list[str] = []

    class Oracle(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            questions.append(body["messages"][-1]["content"])
            answer = "Yes." if "yes, no or unclear" in questions[-1] else "Owl, bat."
            message = {"role": "assistant", "content": answer}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
            reply = json.dumps({**whole, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Oracle) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {"HELPER_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1"}
        folder = {"PYTHONPATH": str(EXAMPLES / "twenty_questions")}
        output = evaluated([crewai, "-c", HELPED], environment() | folder | where)
        server.shutdown()
    assert output.splitlines() == ["yes", "['owl', 'bat']"]
    assert "owl" in questions[0]
    assert "Is it alive? yes" in questions[1]


def evaluated(command: list[str | Path], where: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=where, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def endpoint(model: Path, log: Path) -> Generator[dict[str, str]]:
    """The player behind a URL, as the environment of whoever evaluates it."""
    with at_work(TRAIN, "endpoint", "--model", str(model), "--port", "0", log=log):
        wait_for(lambda: "model: policy" in log.read_text())
        exported = log.read_text().partition("export ")[2].splitlines()[0].split()
        yield environment() | dict(pair.split("=", 1) for pair in exported)


def wait_for(happened: Callable[[], bool], poll_s: float = 0.05) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(poll_s)
