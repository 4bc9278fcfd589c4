"""Gateways in processes of their own: what they serve, and what happens when one dies."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from support.runs.processes import find_gateways
from whet.app.composition.gateway_pool import GatewaySettings, open_gateway_pool
from whet.app.composition.gateway_server import ADDRESS_FILE, count_gateways
from whet.config import resolve
from whet.engines.fake import FakeEngine
from whet.engines.socket_engine import EngineServer
from whet.errors import ConfigError
from whet.models.catalog import resolve_model
from whet.runners.endpoints import Connection, Endpoints
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Endpoint, Rollout

SECRET = b"secret"
VOCABULARY = 2048
PATIENCE_S = 120
"""A busy machine is slow, not stuck."""


@asynccontextmanager
async def open_pool(
    folder: Path, count: int, store: SQLiteStore
) -> AsyncGenerator[tuple[FakeEngine, Endpoints]]:
    engine = FakeEngine(vocabulary=VOCABULARY, decode=lambda tokens: "x" * len(tokens))
    server = EngineServer(engine)
    settings = GatewaySettings(
        config=resolve({"gateway": {"processes": count}}),
        model=resolve_model("tiny"),
        context_length=engine.context_length,
        secret=SECRET.hex(),
        store=folder / "store.db",
        run=store.run,
        judge=None,
        prepares=False,
        log_level=logging.WARNING,
    )
    with anyio.fail_after(PATIENCE_S):
        async with open_gateway_pool(count, settings, server, store, print) as (_, endpoints):
            await endpoints.wait_ready()
            yield engine, endpoints
        await server.close()


async def claim(store: SQLiteStore, id: str) -> Attempt:
    await store.enqueue([Rollout(id=id, group="g", task="t")])
    attempt = await store.claim("worker", lease_s=600, wait_s=0)
    assert attempt is not None
    return attempt


def connect(endpoints: Endpoints, attempt: Attempt) -> Connection:
    connection = endpoints.connect(attempt)
    assert connection is not None
    return connection


async def post(llm: Endpoint, messages: list[dict[str, str]]) -> str:
    async with httpx.AsyncClient(verify=False, timeout=PATIENCE_S) as client:
        reply = await client.post(
            f"{llm.base_url}/chat/completions",
            json={"model": llm.model, "messages": messages, "max_tokens": 3},
            headers={"authorization": f"Bearer {llm.api_key}"},
        )
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


@pytest.mark.anyio
async def test_a_killed_gateway_is_started_again_and_continues_its_conversations(
    tmp_path: Path,
) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        async with open_pool(tmp_path, 1, store) as (engine, endpoints):
            attempt = await claim(store, "r1")
            connection = connect(endpoints, attempt)
            messages = [{"role": "user", "content": "one"}]
            text = await post(connection.endpoint, messages)
            assert not await connection.was_lost()
            [gateway] = find_gateways(os.getpid())
            os.kill(gateway, signal.SIGKILL)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "two"},
            ]
            await post(connection.endpoint, messages)
            assert await connection.was_lost(), "what failed meanwhile is not the agent's fault"
            await endpoints.wait_ready()
            assert not await connect(endpoints, attempt).was_lost()
            [again] = find_gateways(os.getpid())
            assert again != gateway
        assert find_gateways(os.getpid()) == []
        first, second = await store.calls(attempt.id)
        assert second.parent == first.generation_id(0)
        reply = first.generations[0].tokens
        assert engine.prompts[1] == (*engine.prompts[0], *reply, *second.prompt_suffix)


@pytest.mark.anyio
async def test_every_gateway_records_the_calls_of_its_own_attempts(tmp_path: Path) -> None:
    async with (
        SQLiteStore(tmp_path / "store.db") as store,
        open_pool(tmp_path, 2, store) as (_, endpoints),
    ):
        attempts = [await claim(store, f"r{n}") for n in range(12)]
        urls = [connect(endpoints, attempt).endpoint for attempt in attempts]
        assert len({httpx.URL(llm.base_url).port for llm in urls}) == 2
        async with anyio.create_task_group() as tasks:
            for llm in urls:
                tasks.start_soon(post, llm, [{"role": "user", "content": llm.base_url}])
        for attempt, llm in zip(attempts, urls, strict=True):
            [call] = await store.calls(attempt.id)
            assert call.messages[0]["content"] == llm.base_url


PARENT = """
import sys, anyio
from pathlib import Path
sys.path[:] = {path!r}
from app.composition.test_gateway_pool import open_pool
from whet.store.sqlite import SQLiteStore

async def main():
    folder = Path({folder!r})
    async with SQLiteStore(folder / "store.db") as store, open_pool(folder, 2, store):
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.slow
def test_gateways_end_with_the_process_that_started_them_even_if_it_is_killed(
    tmp_path: Path,
) -> None:
    tests = str(Path(__file__).parents[2])
    code = PARENT.format(path=[tests, *sys.path], folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        gateways = find_gateways(run.pid)
        assert len(gateways) == 2
        run.kill()
        run.wait()
    deadline = time.monotonic() + PATIENCE_S
    while any(b"gateway_worker" in _read_command(pid) for pid in gateways):
        assert time.monotonic() < deadline, "a gateway outlives its parent"
        time.sleep(0.05)


def _read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.anyio
async def test_what_a_gateway_cannot_start_with_is_a_config_error(tmp_path: Path) -> None:
    server = EngineServer(FakeEngine())
    settings = GatewaySettings.model_validate(
        {
            "config": resolve({}),
            "model": str(tmp_path / "nothing"),
            "context_length": 8,
            "secret": "",
            "store": str(tmp_path / "store.db"),
            "run": "default",
            "judge": None,
            "prepares": False,
            "log_level": logging.WARNING,
        }
    )
    async with SQLiteStore(tmp_path / "store.db") as store:
        with pytest.raises(ConfigError, match="nothing"):
            async with open_gateway_pool(1, settings, server, store, print):
                pass
    await server.close()


def test_the_number_of_gateways_depends_on_cores_and_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def count(cores: int, **settings: object) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        return count_gateways(resolve(json.loads(json.dumps(settings))))

    assert [count(cores) for cores in (1, 2, 3, 4, 8, 16, 64)] == [0, 0, 0, 1, 2, 2, 2]
    assert count(16, runner={"processes": 0}) == 0, "one setting: everything in one process"
    assert count(2, gateway={"processes": 3}) == 3
    assert count(16, gateway={"port": 8000}) == 1
    assert count(16, runner={"ray": "auto"}) == 0
    monkeypatch.setenv(ADDRESS_FILE, "address")
    assert count(16) == 1
    with pytest.raises(ConfigError, match=r"gateway.processes is 2"):
        count(16, gateway={"processes": 2})
