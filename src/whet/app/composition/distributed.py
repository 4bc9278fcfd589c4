"""Processes of a distributed run: how each reaches store and gateways, and which are alive.

Light to import: every command uses the default addresses.
"""

import logging
import math
import os
import resource
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
from anyio import create_task_group

from whet.errors import ConfigError, StoreError
from whet.io.text import escape_control_characters, hide_passwords
from whet.protocols import Resources, Store
from whet.store import DEFAULT_RUN, is_postgres, open_store
from whet.store.http import token
from whet.types import GatewayAddress, Reward

if TYPE_CHECKING:
    from whet.runners.endpoints import RemoteEndpoints

logger = logging.getLogger(__name__)

PORT = 4747
DEFAULT_STORE = f"http://127.0.0.1:{PORT}"
DATABASE = "store.db"
"""File of `whet store` in its `--dir`."""
STORE_VARIABLE = "WHET_STORE"
"""Environment variable with the store's address, for all processes of a run."""

TOKEN_POLL_S = 0.2
TOKEN_WAIT_S = 600.0
"""Seconds that a process waits for the store's token: those of a run start in any order."""
CONNECT_NOTICE_S = 2.0
"""Seconds without a connection before a process prints what it waits for."""
WORKER_POLL_S = 2.0
NO_RUNNER_NOTICE_S = 15.0
"""Seconds without a runner before the command to start one is printed."""


class StoreAddress(NamedTuple):
    """A run in a store."""

    url: str
    run: str
    token: str

    @property
    def shown_url(self) -> str:
        """The URL without a password, to be printed."""
        return hide_passwords(self.url)

    @property
    def secret(self) -> bytes:
        """Secret of the run's API keys, shared by its gateways and runners."""
        from whet.gateway import auth  # noqa: PLC0415 - not for `--help`

        return auth.derive_secret(self.token, self.run)


def raise_file_limit() -> None:
    """Allow as many open files as the system permits: every attempt holds a few connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems permit less than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def print_line(text: str) -> None:
    """Print one line, which may quote an agent, to stdout and flush it."""
    sys.stdout.write(escape_control_characters(text) + "\n")
    sys.stdout.flush()


async def find_store(
    url: str, run: str | None, directory: Path, *, or_else: str = ""
) -> StoreAddress:
    """The address of a run with the store's token; waits until the token is in the directory.

    `or_else` says what to type if no store was meant.

    Raises:
        ConfigError: there is no token after `TOKEN_WAIT_S`, or it cannot be read; or there is none
            for a PostgreSQL, for which no process makes one.
    """
    if is_postgres(url) and not _has_token(directory):
        raise ConfigError(
            f"no token for {hide_passwords(url)}: set {token.VARIABLE} to a secret of your choice, "
            "the same for every process of the run"
        )
    if not _has_token(directory):
        file = directory / token.FILE
        advice = f"start `whet store` with this --dir, or set {token.VARIABLE}{or_else}"
        print_line(f"waiting for the store's token in {file}, {TOKEN_WAIT_S:g} s at most: {advice}")
        with anyio.move_on_after(TOKEN_WAIT_S):
            while not _has_token(directory):  # noqa: ASYNC110 - another process makes it
                await anyio.sleep(TOKEN_POLL_S)
        if not _has_token(directory):
            found = f"no store's token in {file} after {TOKEN_WAIT_S:g} s"
            raise ConfigError.phrase(
                python=f"{found}: start the store with this dir, or set {token.VARIABLE}",
                command=f"{found}: {advice}",
            )
    return StoreAddress(url, run or DEFAULT_RUN, token.find_token(directory))


def _has_token(directory: Path) -> bool:
    return bool(os.environ.get(token.VARIABLE)) or (directory / token.FILE).is_file()


@asynccontextmanager
async def connect_store(address: StoreAddress) -> AsyncGenerator[Store]:
    """Connect to the store of a run; waits until it answers."""

    async def print_notice() -> None:
        await anyio.sleep(CONNECT_NOTICE_S)
        start = "" if is_postgres(address.url) else ": start it with `whet store`"
        print_line(f"waiting for the store at {address.shown_url}{start}")

    async with open_store(address.url, run=address.run, token=address.token) as store:
        async with create_task_group() as tasks:
            tasks.start_soon(print_notice)
            await store.resources()
            tasks.cancel_scope.cancel()
        yield store


def find_endpoints(
    store: Store,
    secret: bytes,
    addresses: Sequence[GatewayAddress] = (),
    progress: Callable[[str], None] = logger.info,
) -> "RemoteEndpoints":
    """Endpoints at the gateways of a run, which the store has registered, or at fixed addresses."""
    from whet.gateway import auth  # noqa: PLC0415 - not for `--help`
    from whet.runners.endpoints import RemoteEndpoints  # noqa: PLC0415

    mint_key = partial(auth.mint_key, secret=secret)
    mint_reward_key = partial(auth.mint_reward_key, secret=secret)
    return RemoteEndpoints(store, mint_key, mint_reward_key, addresses=addresses, progress=progress)


async def explain_unread(resources: Resources, reward: Reward) -> str:
    """Return why the training of a store's run does not read a reward; empty if it may."""
    from whet.algorithms import explain_unread_reward  # noqa: PLC0415 - not for `--help`
    from whet.app.composition.weight_sync import read_policies  # noqa: PLC0415

    try:
        policies = await read_policies(resources)
    except StoreError:  # of another version of whet, which its gateway reports
        return ""
    return explain_unread_reward(reward, [p.algorithm for p in policies if p.algorithm])


@asynccontextmanager
async def watch_workers(store: Store, progress: Callable[[str], None]) -> AsyncGenerator[None]:
    """Report runners that join or leave, and their warnings, while the block runs."""
    from whet.runners.diagnostics import read_warnings  # noqa: PLC0415 - not for `--help`

    async def watch() -> None:
        alive = set[str]()
        warned = set[str]()
        seen = anyio.current_time()
        while True:
            workers = {worker.name for worker in await store.workers() if worker.due > time.time()}
            for name in sorted(workers - alive):
                progress(f"runner {name} joined")
            for name in sorted(alive - workers):
                progress(f"runner {name} is gone")
            alive = workers
            for name, text in (await read_warnings(store)).items():
                if name not in warned:
                    warned.add(name)
                    progress(text)
            if alive:
                seen = anyio.current_time()
            elif anyio.current_time() > seen + NO_RUNNER_NOTICE_S:
                seen = math.inf
                progress("no runner is connected: start one with `whet runner module:agent`")
            await anyio.sleep(WORKER_POLL_S)

    async with create_task_group() as tasks:
        tasks.start_soon(watch)
        yield
        tasks.cancel_scope.cancel()
