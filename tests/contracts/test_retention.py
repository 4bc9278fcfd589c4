"""Sizes, pruning, dropping, export and import: what every store promises."""

import asyncio
import os
import zipfile
from pathlib import Path

import anyio
import pytest

from support.clock import Clock
from support.store.records import (
    WON,
    claim,
    failed,
    finish_all,
    full_call,
    nothing_to_claim,
    rollout,
    span,
    step,
)
from whet.errors import LeaseLost, NotFound, StoreError
from whet.protocols import Store
from whet.types import (
    Mode,
    Outcome,
    Reward,
    Rollout,
    RunSize,
)

pytestmark = pytest.mark.anyio


async def test_the_size_of_every_run_is_known(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    attempt = await claim(store)
    await store.append(full_call(attempt.id, "1"))
    await store.for_run("other").publish("x", 1)
    sizes = await store.size()
    mine = sizes[store.run]
    assert (mine.rollouts, mine.attempts, mine.calls) == (2, 1, 1)
    assert mine.bytes > 500
    assert sizes["other"] == RunSize(rollouts=0, attempts=0, calls=0, spans=0, bytes=0)
    await store.record(attempt.id, [span(1)])
    larger = (await store.size())[store.run]
    assert (larger.spans, larger.bytes > mine.bytes + 400) == (1, True)


async def test_pruning_forgets_calls_but_not_how_rollouts_ended(store: Store, clock: Clock) -> None:
    val = Rollout(id="val", task=1, group="g", mode=Mode.VAL)
    unretried = [rollout(id_, max_attempts=1) for id_ in ("bad", "unused_bad")]
    await store.enqueue([rollout("used"), rollout("unused"), val, *unretried])
    used, unused, val_attempt, *bad = [await claim(store) for _ in range(5)]
    for attempt in (used, unused, val_attempt, *bad):
        await store.append(full_call(attempt.id))
        await store.record(attempt.id, [span(1)])
        await store.emit(attempt.id, Reward(value=1))
    for attempt in (used, unused, val_attempt):
        await store.finish(attempt.id, WON)
    for attempt in bad:
        await store.finish(attempt.id, failed())
    await store.commit(step(0, "used", "bad"))

    assert await store.prune(clock.now) == 0
    clock.now += 10
    await finish_all(store, "young")
    assert await store.prune(clock.now) == 3
    assert await store.prune(clock.now) == 0
    await store.vacuum()

    ids = ["used", "unused", "val", "bad", "unused_bad"]
    kept = [t.attempt.rollout.id for t in await store.trajectories(ids, failed=True)]
    assert kept == ["unused", "unused_bad"], "those that a step may still train"
    assert await store.calls(unused.id) == [full_call(unused.id)]
    assert await store.calls(used.id) == []
    assert (await store.spans(unused.id), await store.spans(used.id)) == ([span(1)], [])
    assert (await store.counts())["calls"] == 2
    assert set(await store.failures(["bad"])) == {"bad"}
    await store.enqueue([rollout("used"), val, rollout("bad")])
    assert await nothing_to_claim(store)
    with pytest.raises(StoreError):
        await store.commit(step(1, "used"))


async def test_a_dropped_run_leaves_no_trace_and_its_neighbor_whole(store: Store) -> None:
    other = store.for_run("other")
    for run in (store, other):
        await run.publish("prompt", 1)
        await run.enqueue([rollout("a"), rollout("b")])
        attempt = await claim(run)
        await run.append(full_call(attempt.id))
        await run.record(attempt.id, [span(1)])
        await run.emit(attempt.id, Reward(value=1))
        await run.finish(attempt.id, WON)
        with pytest.raises(LeaseLost):
            await run.finish(attempt.id, failed())
        await run.commit(step(0, "a"))
    before = await other.trajectories(["a"])
    running = await claim(store)
    with pytest.raises(StoreError, match="has running attempts"):
        await store.drop()
    await store.finish(running.id, WON)
    await store.drop()
    await store.vacuum()
    assert list(await store.size()) == ["other"]
    assert await store.rollouts() == []
    assert await other.trajectories(["a"]) == before
    await store.enqueue([rollout("a")])
    assert (await claim(store)).id == "a.1"


async def test_a_wait_for_rollouts_of_a_dropped_run_ends(store: Store) -> None:
    await store.enqueue([rollout("a")])
    waiting = asyncio.create_task(store.wait(["a"]))
    await anyio.wait_all_tasks_blocked()
    await store.drop()
    with anyio.fail_after(10), pytest.raises(NotFound):
        await waiting


async def fill(store: Store, clock: Clock) -> None:
    await store.publish("prompt", {"text": "\ud83d \x00"})
    await store.enqueue([rollout(id_, resources={"prompt": "latest"}) for id_ in "abcdef"])
    for n in range(5):
        clock.now += 0.1
        attempt = await claim(store, f"w{n % 2}")
        await store.append(full_call(attempt.id, "1"))
        await store.append(full_call(attempt.id, "2"))
        await store.emit(attempt.id, Reward(value=n / 3, key="k"))
        await store.record(attempt.id, [span(2), span(1, start=1)])
        if n < 4:
            await store.finish(attempt.id, failed() if n == 1 else Outcome(reward=n / 7))
        if n == 2:
            with pytest.raises(LeaseLost):
                await store.finish(attempt.id, WON)
    await store.cancel(["f"])
    await store.commit(step(0, "a"))


async def everything(store: Store) -> list[object]:
    records = await store.rollouts()
    ids = [record.rollout.id for record in records]
    attempts = [await store.attempts(id_) for id_ in ids]
    return [
        records,
        attempts,
        [await store.calls(attempt.id) for row in attempts for attempt in row],
        [await store.spans(attempt.id) for row in attempts for attempt in row],
        await store.trajectories(ids),
        await store.steps(),
        await store.resources(),
        await store.workers(),
        await store.counts(),
    ]


async def test_a_run_is_exported_and_loaded_exactly(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    await fill(store, clock)
    file, again = tmp_path / "run.zip", tmp_path / "again.zip"
    await store.export(file)
    copy = store.for_run("copy")
    await copy.load(file)

    assert await everything(copy) == await everything(store)
    await copy.export(again)
    assert again.read_bytes() == file.read_bytes()
    assert not any("part" in name for name in os.listdir(tmp_path))
    clock.now += 61
    assert (await claim(copy)).id == (await claim(store)).id


async def test_an_invalid_export_is_not_loaded(store: Store, clock: Clock, tmp_path: Path) -> None:
    await fill(store, clock)
    file = tmp_path / "run.zip"
    await store.export(file)
    with pytest.raises(StoreError, match="is not empty"):
        await store.load(file)
    (tmp_path / "bad.zip").write_bytes(file.read_bytes()[:-40])
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(tmp_path / "cut.zip", "w") as cut:
        for name in whole.namelist():
            if name != "worker.jsonl":
                cut.writestr(name, whole.read(name))
    for name in ("bad.zip", "cut.zip", "nowhere.zip"):
        with pytest.raises(StoreError, match=name):
            await store.for_run("copy").load(tmp_path / name)
    for found in ("whet-run-4", "whet-run-99"):
        with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
            other.writestr("format", found)
        with pytest.raises(StoreError, match=f"has format '{found}', expected '"):
            await store.for_run("copy").load(tmp_path / "other.zip")
    assert list(await store.size()) == [store.run]


def _rewrite(file: Path, to: Path, table: str, old: str, new: str) -> None:
    """Copy an export with another text in the rows of a table."""
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(to, "w") as changed:
        for name in whole.namelist():
            text = whole.read(name).decode()
            if name == f"{table}.jsonl":
                assert old in text
                text = text.replace(old, new)
            changed.writestr(name, text)


@pytest.mark.parametrize(
    ("table", "old", "new", "error"),
    [
        ("rollout", '"succeeded"', '"evil"', "rollout.status"),
        ("rollout", '"a"', '"../../a"', "rollout.id"),
        ("rollout", '"{', '"{{', "rollout.body"),
        ("rollout", '"train"', '["train"]', "rollout.mode"),
        ("attempt", '"w0"', "[1]", "attempt.worker"),
        ("attempt", '"w0"', '{"base64": 7}', "cannot be loaded"),
        ("resource", '"prompt"', '"../prompt"', "resource.name"),
        ("step", '"step-', '"../../step-', "step.checkpoint"),
    ],
)
async def test_an_export_with_a_value_that_no_run_has_is_not_loaded(
    store: Store, clock: Clock, tmp_path: Path, table: str, old: str, new: str, error: str
) -> None:
    await fill(store, clock)
    file, bad = tmp_path / "run.zip", tmp_path / "bad.zip"
    await store.export(file)
    _rewrite(file, bad, table, old, new)
    with pytest.raises(StoreError, match=error):
        await store.for_run("copy").load(bad)
    assert list(await store.size()) == [store.run]


async def test_gateways_are_neither_exported_nor_loaded(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    await fill(store, clock)
    file, forged = tmp_path / "run.zip", tmp_path / "forged.zip"
    await store.publish("gateway-1", {"url": "http://elsewhere", "model": "m"})
    await store.export(file)
    with zipfile.ZipFile(file) as whole:
        assert "gateway-1" not in whole.read("resource.jsonl").decode()
    _rewrite(file, forged, "resource", '"prompt"', '"gateway-2"')
    copy = store.for_run("copy")
    await copy.load(forged)
    assert "gateway-2" not in [resource.name for resource in await copy.resources()]
