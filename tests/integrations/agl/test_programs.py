"""Programs that call the store get the answers of Agent Lightning 0.3.0, from every store."""

import json
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import whet.agl as agl
from integrations.agl.programs import PROGRAMS, run_program
from whet.agl.store import server as serving
from whet.errors import StoreError
from whet.store.http.bodies import Limits

ANSWERS = json.loads(Path(__file__).with_name("answers.json").read_text())
"""Recorded with `python tests/integrations/agl/programs.py agentlightning`.

`make test-agl` compares again.
"""


@asynccontextmanager
async def open_memory(folder: Path) -> AsyncGenerator[agl.LightningStore]:
    yield agl.InMemoryLightningStore(scan_debounce_seconds=0)


@asynccontextmanager
async def open_sqlite(folder: Path) -> AsyncGenerator[agl.LightningStore]:
    store = agl.SqliteLightningStore(folder / "store.db", scan_debounce_seconds=0)
    yield store
    await store.close()


@asynccontextmanager
async def open_client(folder: Path) -> AsyncGenerator[agl.LightningStore]:
    inner = agl.InMemoryLightningStore(scan_debounce_seconds=0)
    server = agl.LightningStoreServer(inner, port=0, token="secret")
    await server.start()
    client = agl.LightningStoreClient(server.endpoint, token="secret")
    yield client
    await client.close()
    await server.stop()


OPENED: dict[str, Any] = {"memory": open_memory, "sqlite": open_sqlite, "client": open_client}


@pytest.mark.parametrize("kind", OPENED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gets_the_recorded_answers(name: str, kind: str, tmp_path: Path) -> None:
    async def run() -> list[Any]:
        async with OPENED[kind](tmp_path) as store:
            return await run_program(agl, store, name)

    assert anyio.run(run) == ANSWERS[name]


def test_a_batch_with_a_known_span_reports_the_new_ones() -> None:
    # Theirs stores them and reports none.
    async def run() -> list[str]:
        store = agl.InMemoryLightningStore()
        rollout = await store.start_rollout(1)
        spans = [
            agl.Span.from_attributes(
                attributes={},
                rollout_id=rollout.rollout_id,
                attempt_id=rollout.attempt.attempt_id,
                span_id=id,
            )
            for id in ("a", "b", "a")
        ]
        return [span.span_id for span in await store.add_many_spans(spans)]

    assert anyio.run(run) == ["a", "b"]


def test_a_wait_ends_when_a_time_limit_does() -> None:
    # Theirs looks for time-outs only when another call comes.
    async def run() -> list[str]:
        store = agl.InMemoryLightningStore(scan_debounce_seconds=0)
        rollout = await store.start_rollout(1, config=agl.RolloutConfig(timeout_seconds=0.05))
        ended = await store.wait_for_rollouts([rollout.rollout_id])
        return [each.status for each in ended]

    assert anyio.run(run) == ["failed"]


def test_a_wait_is_woken_by_another_event_loop() -> None:
    async def run() -> list[str]:
        store = agl.InMemoryLightningStore()
        rollout = await store.start_rollout(1)

        def finish() -> None:
            anyio.run(store.update_attempt, rollout.rollout_id, "latest", "succeeded")

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, finish)
            await store.wait_for_rollouts([rollout.rollout_id])
        return [each.status for each in await store.query_rollouts()]

    assert anyio.run(run) == ["succeeded"]


def test_a_file_keeps_the_queue_its_spans_and_their_order(tmp_path: Path) -> None:
    async def write() -> None:
        store = agl.SqliteLightningStore(tmp_path / "store.db")
        await store.add_resources({"llm": agl.LLM(endpoint="http://h/v1", model="m")})
        config = agl.RolloutConfig(max_attempts=2, retry_condition=["failed"])
        for task in ("retried", "waiting", "running"):
            await store.enqueue_rollout(task, config=config)
        first = await store.dequeue_rollout(worker_id="w")
        assert first is not None
        await store.add_span(
            agl.Span.from_attributes(
                attributes={"ids": [1]},
                rollout_id=first.rollout_id,
                attempt_id=first.attempt.attempt_id,
                sequence_id=7,
            )
        )
        await store.update_attempt(first.rollout_id, "latest", status="failed")
        await store.close()

    async def read() -> dict[str, Any]:
        store = agl.SqliteLightningStore(tmp_path / "store.db")
        order = [each.input for each in await store.dequeue_many_rollouts(limit=9)]
        [retried] = [r for r in await store.query_rollouts() if r.input == "retried"]
        found = {
            "order": order,
            "spans": [span.attributes for span in await store.query_spans(retried.rollout_id)],
            "next": await store.get_next_span_sequence_id(retried.rollout_id, "x"),
            "attempts": len(await store.query_attempts(retried.rollout_id)),
            "resources": retried.resources_id,
        }
        latest = await store.get_latest_resources()
        assert latest is not None
        assert found.pop("resources") == latest.resources_id
        await store.close()
        return found

    anyio.run(write)
    assert anyio.run(read) == {
        "order": ["waiting", "running", "retried"],
        "spans": [{"ids": [1]}],
        "next": 8,
        "attempts": 2,
    }


def test_what_a_call_has_changed_is_on_disk_even_if_another_thread_wrote_it(
    tmp_path: Path,
) -> None:
    class LateStore(agl.SqliteLightningStore):
        """One whose first call is overtaken by the second, as among threads."""

        overtaken: anyio.Event | None = None

        async def _flush(self) -> None:
            event, self.overtaken = self.overtaken, None
            if event is not None:
                await event.wait()
            await super()._flush()

    async def run() -> list[str]:
        store = LateStore(tmp_path / "store.db")
        reader = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        reader.execute("BEGIN IMMEDIATE")  # nothing can be written
        store.overtaken = overtaken = anyio.Event()
        before, ended = list[str](), list[str]()

        async def enqueue(task: str) -> None:
            await store.enqueue_rollout(task)
            ended.append(task)

        async with anyio.create_task_group() as group:
            group.start_soon(enqueue, "first")
            group.start_soon(enqueue, "second")
            await anyio.wait_all_tasks_blocked()
            overtaken.set()
            await anyio.wait_all_tasks_blocked()
            before += ended
            reader.execute("COMMIT")
        assert sorted(ended) == ["first", "second"]
        reader.close()
        await store.close()
        return before

    assert anyio.run(run) == []


def test_a_client_waits_longer_than_one_request_may_take() -> None:
    async def run() -> list[str]:
        inner = agl.InMemoryLightningStore(scan_debounce_seconds=0)
        server = agl.LightningStoreServer(inner, port=0, token="secret")
        await server.start()
        client = agl.LightningStoreClient(server.endpoint, token="secret", request_timeout=1.5)
        config = agl.RolloutConfig(timeout_seconds=2.0)
        rollout = await inner.start_rollout(1, config=config)
        ended = await client.wait_for_rollouts([rollout.rollout_id])
        await client.close()
        await server.stop()
        return [each.status for each in ended]

    assert anyio.run(run) == ["failed"]


def test_a_client_needs_the_token_and_a_server(tmp_path: Path) -> None:
    async def run() -> None:
        server = agl.LightningStoreServer(agl.InMemoryLightningStore(), port=0, token="secret")
        await server.start()
        stranger = agl.LightningStoreClient(server.endpoint, token="other")
        with pytest.raises(agl_errors.ConfigError, match="token"):
            await stranger.dequeue_rollout()
        await server.stop()
        lost = agl.LightningStoreClient(stranger.server_address, token="secret", retry_delays=())
        with pytest.raises(agl_errors.StoreError, match="agl store"):
            await lost.dequeue_rollout()
        await stranger.close()
        await lost.close()

    import whet.errors as agl_errors

    anyio.run(run)


def test_a_server_refuses_a_body_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with open_client(Path()) as client:
            await client.start_rollout("short")
            with pytest.raises(StoreError, match="the body is larger than 1000 bytes"):
                await client.start_rollout("x" * 1000)

    monkeypatch.setattr(serving, "LIMITS", Limits(body=1000))
    anyio.run(run)
