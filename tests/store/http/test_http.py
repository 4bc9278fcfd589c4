"""A served store over time: waiting, leaving, closing, being away, and being killed."""

import gzip
import logging
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from anyio.from_thread import start_blocking_portal

from support.store.served_store import TOKEN, ServerProcess, serve, server_process
from whet.errors import ConfigError, LeaseLost, NotFound, StoreClosed, StoreError
from whet.protocols import Store
from whet.store import open_store
from whet.store.http.client import HTTPStore
from whet.store.http.server import StoreServer
from whet.store.sqlite import SQLiteStore
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Generation,
    Outcome,
    Reward,
    Rollout,
    Sampling,
    Status,
)

pytestmark = pytest.mark.anyio

MINUTE = 60.0
WON = Outcome(reward=1.0)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "store.db") as store:
        yield store


@pytest.fixture
async def server(served: SQLiteStore) -> AsyncGenerator[StoreServer]:
    async with serve(served) as server:
        yield server


@pytest.fixture
async def store(server: StoreServer) -> AsyncGenerator[HTTPStore]:
    async with HTTPStore.connect(server.url, token=TOKEN, patience_s=10) as store:
        yield store


def rollouts(*ids: str) -> list[Rollout]:
    return [Rollout(id=id_, task=id_, group="g", max_attempts=3) for id_ in ids]


def call(attempt: AttemptId, name: str, tokens: int = 500) -> Call:
    return Call(
        id=CallId(f"{attempt}-{name}"),
        attempt=attempt,
        parent=None,
        root="root",
        messages=({"role": "user", "content": "x"},),
        prompt_suffix=tuple(range(tokens)),
        prompt_length=tokens,
        prompt_digest="digest",
        generations=(
            Generation(
                tokens=tuple(range(tokens)),
                logprobs=(-0.5,) * tokens,
                versions=(1,) * tokens,
                stop="stop",
                sampling=Sampling(),
                message={},
            ),
        ),
        created=0.0,
    )


async def claim(store: Store) -> Attempt:
    attempt = await store.claim("w", lease_s=MINUTE, wait_s=0)
    assert attempt is not None
    return attempt


# ------------------------------------------------------------------ waiting


Act = Callable[[], Awaitable[object]]


async def wake_ms(wait: Act, ring: Act) -> float:
    """From the answer to who rings, to the end of the wait."""
    woken: list[float] = []
    rung = 0.0

    async def waiting() -> None:
        await wait()
        woken.append(time.perf_counter())

    async with anyio.create_task_group() as group:
        group.start_soon(waiting)
        await anyio.sleep(0.1)
        assert not woken
        await ring()
        rung = time.perf_counter()
    return (woken[0] - rung) * 1e3


async def wakes(store: Store) -> dict[str, float]:
    """Medians, for each way to wait."""
    took: dict[str, list[float]] = {"claim": [], "wait": [], "ended": []}
    for n in range(5):
        one, two = f"{n}a", f"{n}b"
        took["claim"].append(
            await wake_ms(
                lambda: store.claim("w", lease_s=MINUTE, wait_s=20),
                lambda one=one: store.enqueue(rollouts(one)),
            )
        )
        took["wait"].append(
            await wake_ms(
                lambda one=one: store.wait([one]),
                lambda one=one: store.finish(AttemptId(f"{one}.1"), WON),
            )
        )
        await store.enqueue(rollouts(two))
        attempt = await claim(store)
        took["ended"].append(
            await wake_ms(
                lambda attempt=attempt: store.ended(attempt.id),
                lambda two=two: store.cancel([two]),
            )
        )
    return {how: statistics.median(times) for how, times in took.items()}


async def test_a_waiting_client_is_notified_at_once(served: SQLiteStore, store: HTTPStore) -> None:
    # Some milliseconds; a busy machine takes longer, looking again in intervals takes a second.
    for each in (served.for_run("in-process"), store):
        took_ms = await wakes(each)
        assert took_ms.keys() == {"claim", "wait", "ended"}
        assert max(took_ms.values()) < 300


async def test_waiting_costs_nearly_nothing(tmp_path: Path) -> None:
    with server_process(tmp_path / "store.db") as server:
        async with HTTPStore.connect(server.url, token=TOKEN) as store:
            await store.enqueue(rollouts("a"))
            attempt = await claim(store)
            async with anyio.create_task_group() as group:
                for _ in range(10):
                    group.start_soon(lambda: store.claim("w", lease_s=MINUTE, wait_s=60))
                    group.start_soon(store.wait, ["a"])
                    group.start_soon(store.ended, attempt.id)
                await anyio.sleep(0.5)
                before, mine = cpu_s(server.pid), time.process_time()
                await anyio.sleep(2)
                assert cpu_s(server.pid) - before < 0.1
                assert time.process_time() - mine < 0.1
                group.cancel_scope.cancel()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_wait_may_be_longer_than_a_request_is_held(
    store: HTTPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.store.http.rpc.MAX_WAIT_S", 0.2)
    await store.enqueue(rollouts("a"))
    attempt = await claim(store)
    ended: list[Status] = []
    claimed: list[Attempt | None] = []

    async def watch() -> None:
        ended.append(await store.ended(attempt.id))

    async def look() -> None:
        claimed.append(await store.claim("w", lease_s=MINUTE, wait_s=30))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(store.wait, ["a"])
            group.start_soon(watch)
            group.start_soon(look)
            await anyio.sleep(1)
            assert not ended
            assert not claimed
            await store.finish(attempt.id, WON)
            await store.enqueue(rollouts("b"))
    assert ended == [Status.SUCCEEDED]
    assert [a.id for a in claimed if a] == ["b.1"]
    assert await store.claim("w", lease_s=MINUTE, wait_s=0.5) is None


async def test_a_client_that_disconnects_frees_what_was_held_for_it(
    served: SQLiteStore, server: StoreServer
) -> None:
    await served.enqueue(rollouts("a"))
    await claim(served)
    async with HTTPStore.connect(server.url, token=TOKEN) as store:
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(lambda: store.claim("gone", lease_s=MINUTE, wait_s=MINUTE))
                group.start_soon(store.wait, ["a"])
                group.start_soon(store.ended, AttemptId("a.1"))
            await held(server, 15)
            group.cancel_scope.cancel()
        await held(server, 0)
        # One whose process ends says no goodbye: its connections are closed, and that is all.
        async with anyio.create_task_group() as group:
            group.start_soon(claim_in_vain, store)
            await held(server, 1)
            await store.close()
    await held(server, 0)
    await served.enqueue(rollouts("b"))
    assert (await claim(served)).id == "b.1"


async def claim_in_vain(store: Store) -> None:
    with pytest.raises(StoreClosed):
        await store.claim("w", lease_s=MINUTE, wait_s=MINUTE)


async def held(server: StoreServer, count: int) -> None:
    """Until as many requests are held."""
    with anyio.fail_after(5):
        while server.held != count:  # noqa: ASYNC110 - it counts, and tells nobody
            await anyio.sleep(0.01)


# ------------------------------------------------------------------ many, and from everywhere


async def test_many_small_requests_travel_together(
    served: SQLiteStore, store: HTTPStore, server: StoreServer
) -> None:
    await store.enqueue(rollouts(*(f"r{n}" for n in range(100))))

    async def work() -> None:
        attempt = await claim(store)
        await store.heartbeat(attempt.id, lease_s=MINUTE)
        for n in range(3):
            await store.append(call(attempt.id, str(n)))
        await store.emit(attempt.id, Reward(value=1))
        await store.finish(attempt.id, WON)

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(work)
    assert await store.counts() == {
        "rollouts": 100,
        "attempts": 100,
        "calls": 300,
        "spans": 0,
        "generations": 300,
        "sampled_tokens": 150_000,
    }
    samples = [
        sample.value
        for family in server.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "whet_store_requests_total"
    ]
    assert sum(samples) < 300, "700 operations in as many requests"


async def test_one_that_is_refused_does_not_spoil_it_for_those_beside_it(store: HTTPStore) -> None:
    await store.enqueue(rollouts("a", "b", "c"))
    a, b, c = await claim(store), await claim(store), await claim(store)
    await store.finish(b.id, WON)
    refused: list[str] = []

    async def append(attempt: AttemptId) -> None:
        try:
            await store.append(call(attempt, "1"))
        except (LeaseLost, NotFound) as error:
            refused.append(type(error).__name__)

    async with anyio.create_task_group() as group:
        for attempt in (a.id, b.id, AttemptId("nobody.1"), c.id):
            group.start_soon(append, attempt)
    assert sorted(refused) == ["LeaseLost", "NotFound"]
    assert (await store.counts())["calls"] == 2


async def test_one_client_serves_several_event_loops(store: HTTPStore) -> None:
    await store.enqueue(rollouts("a", "b"))

    async def claim_next() -> str:
        return (await claim(store)).id

    with start_blocking_portal() as portal:
        ids = [await to_thread.run_sync(portal.call, claim_next), (await claim(store)).id]
    assert ids == ["a.1", "b.1"]


async def test_a_large_batch_comes_back_in_the_order_asked(store: HTTPStore) -> None:
    ids = [f"r{n}" for n in range(150)]
    await store.enqueue(rollouts(*ids))
    for _ in ids:
        attempt = await claim(store)
        await store.append(call(attempt.id, "1", tokens=10))
        await store.finish(attempt.id, WON)
    wanted = list(reversed(ids))
    found = await store.trajectories(wanted)
    assert [t.attempt.rollout.id for t in found] == wanted
    assert all(len(t.calls) == 1 for t in found)


async def test_beyond_this_machine_bodies_are_compressed(
    served: SQLiteStore, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    compress = gzip.compress

    def measured(body: bytes, level: int) -> bytes:
        packed = compress(body, level)
        sizes.append((len(body), len(packed)))
        return packed

    monkeypatch.setattr("whet.store.http.transport.is_loopback", lambda host: False)
    monkeypatch.setattr(gzip, "compress", measured)
    async with HTTPStore.connect(server.url, token=TOKEN) as store:
        await store.enqueue(rollouts("a"))
        attempt = await claim(store)
        made = call(attempt.id, "1")
        await store.append(made)
        assert await store.calls(attempt.id) == await served.calls(attempt.id) == [made]
    [(plain, packed)] = sizes
    assert packed < plain / 2


# ------------------------------------------------------------------ a server that goes away


async def test_a_closing_server_answers_waiting_clients_and_finishes_what_was_begun(
    served: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    await served.enqueue(rollouts("a", "b"))
    attempt = await claim(served)
    server = StoreServer(served, token=TOKEN)
    async with HTTPStore.connect(server.url, token=TOKEN, patience_s=1) as store:
        acknowledged = set[CallId]()

        async def wait_in_vain() -> None:
            with pytest.raises(StoreError, match=r"no response from the store at .* for 1 s"):
                await store.wait(["a"])

        async def append(name: str) -> None:
            made = call(attempt.id, name)
            with suppress(StoreError):  # it came after the server had closed
                await store.append(made)
                acknowledged.add(made.id)

        async with anyio.create_task_group() as group:
            group.start_soon(wait_in_vain)
            await anyio.sleep(0.2)
            began = time.monotonic()
            for n in range(20):
                group.start_soon(append, str(n))
            await anyio.sleep(0.005)
            await to_thread.run_sync(server.close)
            assert time.monotonic() - began < 10
    assert acknowledged <= {each.id for each in await served.calls(attempt.id)}


async def test_a_client_waits_for_a_server_that_is_away_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = ServerProcess(tmp_path / "store.db")
    async with HTTPStore.connect(server.url, token=TOKEN) as store:
        async with anyio.create_task_group() as group:
            for n in range(10):
                group.start_soon(store.enqueue, rollouts(f"r{n}"))
            await anyio.sleep(0.5)
            await to_thread.run_sync(server.start)
        assert len(await store.rollouts()) == 10
        mine = [record for record in caplog.records if "whet.store.http" in record.name]
        logged = [record.getMessage() for record in mine]
        assert len(logged) == 2
        assert logged[0].startswith(f"store unreachable, retrying url={server.url}")
        assert logged[1].startswith(f"store reachable again url={server.url} after_s=")
    await to_thread.run_sync(server.stop)


async def test_a_client_that_is_not_patient_gives_up(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "store.db")
    async with HTTPStore.connect(server.url, token=TOKEN, patience_s=0.3) as store:
        began = time.monotonic()
        for act in (store.steps, lambda: store.append(call(AttemptId("a.1"), "1"))):
            with pytest.raises(
                StoreError, match=f"no response from the store at {server.url} for 0 s"
            ):
                await act()
        assert time.monotonic() - began < 3


async def test_a_wrong_token_is_no_reason_to_wait(server: StoreServer) -> None:
    async with open_store(server.url, token="wrong") as store:
        for act in (store.steps, lambda: store.heartbeat(AttemptId("a.1"), lease_s=1)):
            with pytest.raises(ConfigError, match="WHET_STORE_TOKEN"):
                await act()


@pytest.mark.parametrize("url", ["http://", "http://host:port", "https://:80", "http://h/?x=1"])
def test_an_invalid_url_of_a_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="invalid store URL"):
        open_store(url, token="t")


async def test_another_server_at_the_address_is_an_error_that_says_so(tmp_path: Path) -> None:
    async def hello(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, hello)
        async with open_store(f"http://127.0.0.1:{port}", token="t") as store:
            with pytest.raises(StoreError, match="status 404: hello"):
                await store.steps()
        group.cancel_scope.cancel()


# ------------------------------------------------------------------ killed


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.slow)])
async def test_nothing_is_lost_or_doubled_when_the_server_is_killed_and_started_again(
    tmp_path: Path, kills: int
) -> None:
    """Workers go on over all kills as if there had been none."""
    ids = [f"r{n}" for n in range(30 * kills)]
    more = [f"after{n}" for n in range(kills)]
    worked = Counter[str]()
    acknowledged: set[str] = set()

    async def work(store: Store) -> None:
        while attempt := await store.claim("w", lease_s=MINUTE, wait_s=1):
            worked[attempt.id] += 1
            for n in range(3):
                made = call(attempt.id, str(n), tokens=50)
                await store.append(made)
                acknowledged.add(made.id)
            await store.emit(attempt.id, Reward(value=0.5))
            await store.heartbeat(attempt.id, lease_s=MINUTE)
            await store.finish(attempt.id, WON)

    with server_process(tmp_path / "store.db") as server:
        async with (
            HTTPStore.connect(server.url, token=TOKEN) as one,
            HTTPStore.connect(server.url, token=TOKEN) as two,
        ):
            await one.enqueue(rollouts(*ids))
            async with anyio.create_task_group() as group:
                for n in range(12):
                    group.start_soon(work, one if n % 2 else two)
                for late in more:
                    await anyio.sleep(random.uniform(0.05, 0.4))
                    await to_thread.run_sync(server.kill)
                    await to_thread.run_sync(server.start)
                    await one.enqueue(rollouts(late))
            await one.wait([*ids, *more])
            found = await one.trajectories([*ids, *more])

    assert len(found) == len(worked) == 31 * kills
    assert set(worked.values()) == {1}, "an attempt was given to two"
    assert {trajectory.attempt.number for trajectory in found} == {1}, "a claim was lost"
    assert {c.id for trajectory in found for c in trajectory.calls} == acknowledged
    assert all(len(trajectory.calls) == 3 for trajectory in found)
    assert all(trajectory.rewards == (Reward(value=0.5),) for trajectory in found)


async def test_an_export_that_cannot_be_written_fails_at_once(
    store: HTTPStore, tmp_path: Path
) -> None:
    with (
        anyio.fail_after(5),
        pytest.raises(StoreError, match="cannot write the file: FileNotFound"),
    ):
        await store.export(tmp_path / "nowhere" / "run.zip")
