"""Where the store of a run is, and how a process of that run reaches it."""

import argparse
import os
import resource
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import anyio
from anyio import create_task_group

from whet.gateway import keys
from whet.protocols import Store
from whet.store import token
from whet.store.opening import open_store
from whet.store.sql import DEFAULT_RUN

LOOK_S = 0.2
PATIENCE_S = 2.0
"""After so long a process says what it waits for."""


class Place(NamedTuple):
    """A run in a store."""

    address: str
    run: str
    token: str

    @property
    def secret(self) -> bytes:
        """What the run's gateways and runners mint and check API keys with."""
        return keys.secret_of(self.token, self.run)


def allow_many_files() -> None:
    """As many open files as the system lets us have: every attempt holds a few connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems have a lower limit than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def say(text: str) -> None:
    """One line for whoever watches this process."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def place_of(args: argparse.Namespace) -> Place:
    """What the flags `--store --run --dir` name."""
    return await find_place(args.store, args.run_name or DEFAULT_RUN, Path(args.dir))


async def find_place(address: str, run: str, directory: Path) -> Place:
    """A run of a store, once the store's token is there; says so if it is not yet."""
    told = False
    while not _has_token(directory):
        if not told:
            told = True
            say(
                f"waiting for the store's token in {directory / token.FILE}: start `whet store` "
                f"with this --dir, or set {token.VARIABLE}"
            )
        await anyio.sleep(LOOK_S)
    return Place(address, run, token.find_token(directory))


def _has_token(directory: Path) -> bool:
    return bool(os.environ.get(token.VARIABLE)) or (directory / token.FILE).is_file()


@asynccontextmanager
async def joined(place: Place) -> AsyncGenerator[Store]:
    """The store of a run, once it answers; says so if that takes long."""

    async def tell() -> None:
        await anyio.sleep(PATIENCE_S)
        say(f"waiting for the store at {place.address}: start it with `whet store`")

    async with open_store(place.address, run=place.run, token=place.token) as store:
        async with create_task_group() as tasks:
            tasks.start_soon(tell)
            await store.resources()
            tasks.cancel_scope.cancel()
        yield store
