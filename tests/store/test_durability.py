"""The SQLite store after failures of its disk, its file and its process."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from support.store.records import call, claim, rollouts
from support.store.small_disk import find_small_disk
from whet.errors import StoreError
from whet.store.sqlite import PAGE_BYTES, SQLiteStore
from whet.types import Attempt, AttemptId, Outcome

pytestmark = pytest.mark.anyio

TESTS = Path(__file__).parents[1]
UNPRIVILEGED = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


# ------------------------------------------------------------------ a full disk


class Filled(NamedTuple):
    """The report of `full_disk.py`: names of calls, and errors."""

    acknowledged: list[str]
    errors: list[str]
    while_full: list[str]
    reopened: list[str]


def fill_disk(command: list[str]) -> Filled:
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, timeout=120)
    assert done.returncode == 0, done.stderr
    return Filled(*json.loads(done.stdout.splitlines()[-1]))


def check_filled(filled: Filled) -> None:
    assert len(filled.acknowledged) > 50
    assert len(filled.errors) == 8
    assert all(
        "\n" not in error and "nothing of the change was kept" in error for error in filled.errors
    )
    assert set(filled.while_full) == set(filled.acknowledged) - {"after"}
    assert set(filled.reopened) == set(filled.acknowledged)


def test_a_full_disk_loses_nothing_and_once_there_is_room_the_process_goes_on(
    tmp_path: Path,
) -> None:
    program = [sys.executable, "-m", "support.store.full_disk", str(tmp_path)]
    disk = find_small_disk(tmp_path)
    if disk is None:  # a container that may mount nothing: files that may not grow instead
        program.append(str(2**21))
    check_filled(fill_disk([*(disk or []), *program]))


def test_a_file_that_may_not_grow_loses_nothing_either(tmp_path: Path) -> None:
    check_filled(
        fill_disk([sys.executable, "-m", "support.store.full_disk", str(tmp_path), str(2**21)])
    )


# ------------------------------------------------------------------ no right to write


@contextmanager
def unprivileged_folder() -> Generator[Path]:
    """A folder, used by a user who is not root."""
    with tempfile.TemporaryDirectory(prefix="whet-") as name:
        folder = Path(name)
        if os.geteuid() != 0:
            yield folder
            return
        os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
        os.seteuid(UNPRIVILEGED)
        try:
            yield folder
        finally:
            os.seteuid(0)


async def test_a_read_only_file_is_refused_in_one_line_and_works_once_it_is_not() -> None:
    with unprivileged_folder() as folder:
        path = folder / "store.db"
        async with SQLiteStore(path) as store:
            await store.enqueue(rollouts("a"))
        path.chmod(0o400)
        with pytest.raises(
            StoreError, match=r"cannot open the store.*let this user write the file"
        ) as caught:
            SQLiteStore(path)
        assert "\n" not in str(caught.value)
        path.chmod(0o600)
        async with SQLiteStore(path) as store:
            assert (await claim(store)).id == "a.1"


@pytest.mark.parametrize("exists", [True, False])
async def test_a_read_only_folder_is_refused_in_one_line(exists: bool) -> None:
    with unprivileged_folder() as folder:
        path = folder / "store.db"
        if exists:
            async with SQLiteStore(path) as store:
                await store.enqueue(rollouts("a"))
        folder.chmod(0o500)
        with pytest.raises(StoreError, match=r"cannot open the store.*this user") as caught:
            SQLiteStore(path)
        assert "\n" not in str(caught.value)
        folder.chmod(0o700)


# ------------------------------------------------------------------ a damaged file


def contents(path: Path) -> bytes:
    return path.read_bytes()


def replace(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)


async def fill(path: Path, count: int = 60) -> Attempt:
    async with SQLiteStore(path) as store:
        await store.enqueue(rollouts("a", "b"))
        attempt = await claim(store)
        for n in range(count):
            await store.append(call(attempt.id, f"c{n}", tokens=(7,) * 500))
    return attempt


async def test_a_damaged_last_page_is_named_wherever_it_is_met(path: Path) -> None:
    attempt = await fill(path)
    whole = contents(path)
    replace(path, whole[:-PAGE_BYTES] + bytes([255]) * PAGE_BYTES)
    async with SQLiteStore(path) as store:
        with pytest.raises(StoreError, match=r"malformed; keep a copy.*\.recover") as caught:
            await store.calls(attempt.id)
        assert "\n" not in str(caught.value)
        assert [record.rollout.id for record in await store.rollouts()] == ["a", "b"]
        assert (await claim(store)).id == "b.1"


@pytest.mark.parametrize("left", [0.5, 0.9])
async def test_a_truncated_file_is_refused_and_left_as_it_is(path: Path, left: float) -> None:
    await fill(path)
    whole = contents(path)
    cut = whole[: int(len(whole) * left) // PAGE_BYTES * PAGE_BYTES]
    replace(path, cut)
    with pytest.raises(StoreError, match=r"malformed; keep a copy.*\.recover") as caught:
        SQLiteStore(path)
    assert "\n" not in str(caught.value)
    assert contents(path) == cut
    replace(path, whole)
    async with SQLiteStore(path) as store:
        assert (await claim(store)).id == "b.1"


async def test_a_truncated_log_gives_all_that_was_committed_before_the_cut(
    path: Path, tmp_path: Path
) -> None:
    """As after a power cut on a disk that lied: a prefix of the history, never half a change."""
    copy = tmp_path / "copy.db"
    sizes: list[int] = []
    async with SQLiteStore(path) as store:
        await store.enqueue(rollouts("a"))
        attempt = await claim(store)
        log = path.with_name("store.db-wal")
        for n in range(20):
            await store.append(call(attempt.id, f"c{n}", tokens=(7,) * 500))
            sizes.append(len(contents(log)))
        main_file, whole = contents(path), contents(log)
    cuts = [*sizes, *(random.Random(1).randrange(sizes[0], sizes[-1]) for _ in range(10))]
    for cut in cuts:
        replace(copy, main_file)
        replace(copy.with_name("copy.db-wal"), whole[:cut])
        async with SQLiteStore(copy) as store:
            calls = await store.calls(attempt.id)
            assert [c.id for c in calls] == [f"c{n}" for n, size in enumerate(sizes) if size <= cut]
            assert all(len(c.generations) == 1 for c in calls)


# ------------------------------------------------------------------ a killed process

WORK_FOREVER = """
import sys, anyio
from support.store.records import call
from whet.store.sqlite import SQLiteStore
from whet.types import Outcome, Rollout

def report(*words):
    sys.stdout.write(" ".join(words) + "\\n")
    sys.stdout.flush()

async def work(store, worker):
    for n in range(1_000_000):
        await store.enqueue([Rollout(id=f"{sys.argv[2]}-{worker}-{n}", task=1, group="g")])
        attempt = await store.claim("w", lease_s=600, wait_s=60)
        for c in range(3):
            await store.append(call(attempt.id, f"c{c}"))
            report("call", attempt.id, f"c{c}")
        await store.finish(attempt.id, Outcome(reward=float(n)))
        report("end", attempt.id, str(float(n)))

async def main():
    store = SQLiteStore(sys.argv[1])
    async with anyio.create_task_group() as group:
        for worker in range(24):
            group.start_soon(work, store, worker)

anyio.run(main)
"""


def work_and_be_killed(path: Path, name: str, after: int) -> list[list[str]]:
    """Return the acknowledgments that the process printed before it was killed."""
    command = [sys.executable, "-c", WORK_FOREVER, str(path), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(after)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    return [line.split() for line in lines if line.endswith("\n")]


@pytest.mark.slow
async def test_whatever_was_acknowledged_is_there_however_often_the_process_is_killed(
    path: Path,
) -> None:
    """Killed in the middle of commits that many changes share."""
    acknowledged: list[list[str]] = []
    moments = random.Random(7)
    for life in range(4):
        acknowledged += work_and_be_killed(path, f"life{life}", moments.randrange(50, 900))
    async with SQLiteStore(path) as store:
        calls: dict[str, set[str]] = {}
        for kind, attempt, what in acknowledged:
            if kind == "end":
                [record] = await store.attempts(attempt.rpartition(".")[0])
                assert record.reward == float(what)
                with pytest.raises(StoreError, match="has ended"):
                    await store.finish(AttemptId(attempt), Outcome(reward=-1.0))
            else:
                if attempt not in calls:
                    calls[attempt] = {c.id for c in await store.calls(AttemptId(attempt))}
                assert what in calls[attempt]
    assert len(acknowledged) > 1000
