"""`whet runner` and `whet store` as processes, without a model."""

import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from support.runs.processes import start
from whet.app.cli.main import main
from whet.io.server import AppServer
from whet.store import DEFAULT_RUN
from whet.store.http.client import HTTPStore
from whet.store.http.server import StoreServer
from whet.store.sqlite import SQLiteStore
from whet.types import FailureKind, Mode, Rollout, Status

AGENT = """
import asyncio, pathlib, time

async def patient(task, llm):
    pathlib.Path(f"begun-{task}").touch()
    try:
        await asyncio.sleep(600 if task == "long" else 0.01)
    finally:
        pathlib.Path(f"over-{task}").touch()
    return 1.0

def asks_itself(task, llms):
    return float(llms["vllm"].model == "m")

def stuck(task, llm):
    pathlib.Path(f"begun-{task}").touch()
    time.sleep(600 if task == "long" else 0.01)
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


@pytest.fixture
def gateway() -> Iterator[str]:
    async def health(request: Request) -> Response:
        return JSONResponse({"instance": "1"})

    server = AppServer(Starlette(routes=[Route("/health", health)]))
    yield server.url
    server.close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPStore]:
    served = SQLiteStore(tmp_path / "served.db")
    server = StoreServer(served, token="secret")
    client = HTTPStore.connect(server.url, token="secret")
    monkeypatch.setenv("WHET_STORE", server.url)
    monkeypatch.setenv("WHET_STORE_TOKEN", "secret")
    yield client
    anyio.run(client.close)
    server.close()
    anyio.run(served.close)


def enqueue(store: HTTPStore, *tasks: str) -> None:
    rollouts = [Rollout(id=task, group=task, task=task, max_attempts=1) for task in tasks]
    anyio.run(store.enqueue, rollouts)


async def appears(file: Path) -> None:
    with anyio.fail_after(60):
        while not file.exists():  # noqa: ASYNC110, ASYNC240 - another process makes it
            await anyio.sleep(0.02)


@pytest.mark.parametrize("processes", ["0", "2"], ids=["in one process", "in processes"])
@pytest.mark.parametrize("agent", ["patient", "stuck"])
def test_sigterm_lets_attempts_end_and_hands_back_the_rest_at_once(
    folder: Path, store: HTTPStore, gateway: str, agent: str, processes: str
) -> None:
    enqueue(store, "long", "short")
    arguments = ("runner", f"agent.py:{agent}", "--gateway", gateway, "--grace", "0.5")
    with start(folder, *arguments, "--processes", processes) as runner:
        runner.hears("joined run default")
        anyio.run(appears, folder / "begun-long")
        anyio.run(store.wait, ["short"])
        assert runner.stop() == 0
        assert "attempts have 0.5 s to finish" in runner.output
        assert "left: 1 ended, 1 returned to the queue" in runner.output
    (attempt,) = anyio.run(store.attempts, "long")
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.WORKER_LEFT
    (record, _) = anyio.run(store.rollouts)
    assert record.status is Status.QUEUED
    assert agent == "stuck" or (folder / "over-long").exists()


@pytest.mark.parametrize(
    ("processes", "concurrency"),
    [("0", "64"), ("2", "64"), ("2", "2")],
    ids=["in one process", "in shared processes", "alone in a process"],
)
def test_a_cancel_reaches_an_agent_of_a_runner(
    folder: Path, store: HTTPStore, gateway: str, processes: str, concurrency: str
) -> None:
    enqueue(store, "long")
    arguments = ("runner", "agent.py:patient", "--gateway", gateway, "--processes", processes)
    with start(folder, *arguments, "--concurrency", concurrency) as runner:
        anyio.run(appears, folder / "begun-long")
        anyio.run(store.cancel, ["long"])
        anyio.run(appears, folder / "over-long")
        assert runner.stop() == 0


def test_without_a_gateway_agents_have_the_endpoints_of_their_rollout(
    folder: Path, store: HTTPStore
) -> None:
    async def enqueue_with_endpoint() -> None:
        await store.publish("vllm", {"base_url": "http://gpu/v1", "api_key": "none", "model": "m"})
        await store.enqueue([Rollout(id="a", group="g", task="a", resources={"vllm": "latest"})])

    anyio.run(enqueue_with_endpoint)
    with start(folder, "runner", "agent.py:asks_itself", "--gateway", "none") as runner:
        anyio.run(store.wait, ["a"])
        assert runner.stop() == 0
    [found] = anyio.run(store.trajectories, ["a"])
    assert found.reward == 1.0


def test_an_agent_that_takes_llm_needs_a_gateway(folder: Path, store: HTTPStore) -> None:
    with start(folder, "runner", "agent.py:patient", "--gateway", "none") as runner:
        assert runner.ends() == 2
        assert len(runner.lines) == 1
        assert "this one takes `llm`: use the parameter `llms`" in runner.output


def test_the_password_in_the_url_of_a_store_is_not_printed(folder: Path, postgres_url: str) -> None:
    url = postgres_url.replace("whet@", "whet:p%40ss-word@")
    command = ("runner", "agent.py:asks_itself", "--gateway", "none", "--store", url)
    with start(folder, *command, WHET_STORE_TOKEN="token") as runner:
        assert "of postgresql://...@/postgres?host=" in runner.hears("joined run default")
        assert runner.stop() == 0
    assert "ss-word" not in runner.output


def test_a_wrong_token_is_one_line(folder: Path, store: HTTPStore) -> None:
    with start(folder, "runner", "agent.py:patient", WHET_STORE_TOKEN="wrong") as runner:
        assert runner.ends() == 2
        assert len(runner.lines) == 1
        assert "refuses the token" in runner.output


def test_a_process_waits_for_its_store_and_says_so(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with start(folder, "runner", "agent.py:patient", "--store", url) as runner:
        runner.hears("waiting for the store's token in .whet/store.token")
        (folder / ".whet").mkdir()
        token = folder / ".whet" / "store.token"
        token.touch(0o600)
        token.write_text("a token")
        runner.hears(f"waiting for the store at {url}")
        with start(folder, "store", "--port", str(port)) as store:
            store.hears(f"store listens at {url}")
            runner.hears(f"joined run default of {url}")
            runner.hears("waiting for a gateway")
            assert runner.stop() == 0
            assert store.stop() == 0
            assert store.lines[-1] == "stopping the store"


def test_the_stores_token_is_made_once_and_only_its_owner_reads_it(folder: Path) -> None:
    for first in (True, False):
        with start(folder, "store", "--port", "0") as store:
            store.hears("store listens")
            assert store.stop() == 0
        token = (folder / ".whet" / "store.token").read_text().strip()
        assert (token in store.output) == first
    assert (folder / ".whet" / "store.token").stat().st_mode & 0o777 == 0o600


async def fill_store(file: Path, run: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    async with SQLiteStore(file, run=run) as store:
        await store.enqueue([Rollout(id="a", group="a", task="x", mode=Mode.VAL)])
        await store.cancel(["a"])


def test_a_run_in_a_folder_is_named_by_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = folder / ".whet" / "runs" / "alone" / "store.db"
    anyio.run(fill_store, own, DEFAULT_RUN)

    def done(*arguments: str, code: int = 0) -> str:
        assert main(["store", *arguments, "--dir", str(folder / ".whet")]) == code
        out, err = capsys.readouterr()
        return (out + err).strip()

    assert done("size", "--run", "alone").splitlines()[1].split()[:2] == ["alone", "1"]
    assert done("prune", "--run", "alone", "--older-than", "0s") == "alone: pruned 1 rollouts"
    assert done("vacuum", "--run", "alone") == "vacuumed"
    done("export", "--run", "alone", str(folder / "alone.zip"))
    assert (folder / "alone.zip").is_file()
    assert "none of a run 'other' in" in done("size", "--run", "other", code=2)
    assert "`whet clean alone` deletes a run's folder" in done("drop", "--run", "alone", code=2)


def test_a_run_is_imported_into_a_database_that_is_new_and_no_other_action_makes_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, archive = folder / "new.db", str(folder / "mine.zip")
    anyio.run(fill_store, folder / ".whet" / "store.db", "mine")

    def done(*arguments: str, code: int = 0) -> str:
        assert main(["store", *arguments]) == code
        out, err = capsys.readouterr()
        return (out + err).strip()

    assert "no such file" in done("import", "--run", "a", archive, "--db", str(file), code=2)
    done("export", "--run", "mine", archive, "--dir", str(folder / ".whet"))
    for action in (["size"], ["vacuum"], ["drop", "--run", "a"], ["export", "--run", "a", "x.zip"]):
        assert "no store at" in done(*action, "--db", str(file), code=2)
    assert not file.exists()
    done("import", "--run", "a", archive, "--db", str(file))
    assert done("size", "--db", str(file)).splitlines()[1].split()[:2] == ["a", "1"]


def test_what_a_store_keeps_is_shown_moved_and_forgotten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fill() -> None:
        await fill_store(folder / ".whet" / "store.db", "mine")

    def done(*arguments: str, code: int = 0) -> str:
        assert main(["store", *arguments, "--dir", str(folder / ".whet")]) == code
        out, err = capsys.readouterr()
        return (out + err).strip()

    assert "a run without `whet store` has its own: --run NAME" in done("size", code=2)
    anyio.run(fill)
    assert "mine " in done("size")
    assert done("prune", "--older-than", "0s") == "mine: pruned 1 rollouts"
    assert "such as 7d" in done("prune", "--older-than", "7 days", code=2)
    done("export", "--run", "mine", str(folder / "mine.zip"))
    done("import", "--run", "copy", str(folder / "mine.zip"))
    done("drop", "--run", "mine")
    assert "unknown run 'mine'" in done("drop", "--run", "mine", code=2)
    assert done("vacuum") == "vacuumed"
    assert [line.split()[0] for line in done("size").splitlines()] == ["run", "copy"]
    with sqlite3.connect(folder / ".whet" / "store.db") as db:
        assert db.execute("SELECT count(*) FROM rollout").fetchone() == (1,)
