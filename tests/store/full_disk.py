"""A program that fills the disk its store is on, makes room, and goes on. Run by the tests.

    python full_disk.py FOLDER [LIMIT]

FOLDER is a small file system, or LIMIT is how large a file may become. Prints what came of it.
"""

import json
import resource
import sys
from pathlib import Path

import anyio
from test_sqlite import call, claim, rollouts

from whet.errors import StoreError
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt

LANES = 8
BALLAST = 2**22


def leave_little_room(folder: Path, limit: int) -> None:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    else:
        (folder / "ballast").write_bytes(bytes(BALLAST))


def make_room(folder: Path, limit: int) -> None:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * limit, resource.RLIM_INFINITY))
    else:
        (folder / "ballast").unlink()


async def fill(store: SQLiteStore, attempt: Attempt, lane: int, told: list[str]) -> None:
    for n in range(100_000):
        name = f"{lane}-{n}"
        await store.append(call(attempt.id, name, tokens=(7,) * 500))
        told.append(name)


async def names(store: SQLiteStore, attempt: Attempt) -> list[str]:
    return [call.id for call in await store.calls(attempt.id)]


async def main(folder: Path, limit: int) -> None:
    told: list[str] = []
    errors: list[str] = []

    async def fill_until_refused(store: SQLiteStore, attempt: Attempt, lane: int) -> None:
        try:
            await fill(store, attempt, lane, told)
        except StoreError as error:
            errors.append(str(error))

    async with SQLiteStore(folder / "store.db") as store:
        await store.enqueue(rollouts("a", "b"))
        attempt = await claim(store)
        leave_little_room(folder, limit)
        async with anyio.create_task_group() as group:
            for lane in range(LANES):
                group.start_soon(fill_until_refused, store, attempt, lane)
        while_full = await names(store, attempt)
        make_room(folder, limit)
        await store.append(call(attempt.id, "after"))
        told.append("after")
    async with SQLiteStore(folder / "store.db") as again:
        reopened = await names(again, attempt)
        await claim(again)
    sys.stdout.write(json.dumps([told, errors, while_full, reopened]))


anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
