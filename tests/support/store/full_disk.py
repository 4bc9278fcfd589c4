"""A program that fills the disk of its store, frees space, and continues. Run by the tests.

    python full_disk.py FOLDER [LIMIT]

FOLDER is a small file system, or LIMIT is the maximal size of a file. Prints a JSON report.
"""

import json
import resource
import sys
from pathlib import Path

import anyio

from support.store.records import call, claim, rollouts
from whet.errors import StoreError
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt

WORKERS = 8
BALLAST = 2**22


def leave_little_space(folder: Path, limit: int) -> None:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    else:
        (folder / "ballast").write_bytes(bytes(BALLAST))


def free_space(folder: Path, limit: int) -> None:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * limit, resource.RLIM_INFINITY))
    else:
        (folder / "ballast").unlink()


async def fill(store: SQLiteStore, attempt: Attempt, worker: int, acknowledged: list[str]) -> None:
    for n in range(100_000):
        name = f"{worker}-{n}"
        await store.append(call(attempt.id, name, tokens=(7,) * 500))
        acknowledged.append(name)


async def names(store: SQLiteStore, attempt: Attempt) -> list[str]:
    return [call.id for call in await store.calls(attempt.id)]


async def main(folder: Path, limit: int) -> None:
    acknowledged: list[str] = []
    errors: list[str] = []

    async def fill_until_refused(store: SQLiteStore, attempt: Attempt, worker: int) -> None:
        try:
            await fill(store, attempt, worker, acknowledged)
        except StoreError as error:
            errors.append(str(error))

    async with SQLiteStore(folder / "store.db") as store:
        await store.enqueue(rollouts("a", "b"))
        attempt = await claim(store)
        leave_little_space(folder, limit)
        async with anyio.create_task_group() as group:
            for worker in range(WORKERS):
                group.start_soon(fill_until_refused, store, attempt, worker)
        while_full = await names(store, attempt)
        free_space(folder, limit)
        await store.append(call(attempt.id, "after"))
        acknowledged.append("after")
    async with SQLiteStore(folder / "store.db") as again:
        reopened = await names(again, attempt)
        await claim(again)
    sys.stdout.write(json.dumps([acknowledged, errors, while_full, reopened]))


anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
