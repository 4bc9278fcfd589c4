"""`whet store`: serve a store to the other processes, and look after what it keeps."""

import argparse
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from anyio import to_thread

from whet.app.addresses import DATABASE
from whet.app.places import allow_many_files, place_of, say
from whet.app.signals import run_async, stoppable
from whet.errors import ConfigError, StoreError
from whet.gateway import keys
from whet.protocols import Store
from whet.store.opening import open_database, open_store
from whet.store.server import StoreServer
from whet.store.sql import DEFAULT_RUN
from whet.store.token import FILE, make_token
from whet.types import AttemptId

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def serve_store(args: argparse.Namespace) -> int:
    """`whet store`."""
    allow_many_files()
    run_async(_serve, args)
    return 0


async def _serve(args: argparse.Namespace) -> None:
    directory = Path(args.dir)
    token = make_token(directory)
    database = args.db or str(directory / DATABASE)
    async with stoppable() as stop, open_database(database) as store:
        server = StoreServer(
            store, token=token.value, host=args.host, port=args.port, read_key=_keys_of(token.value)
        )
        say(f"store listens at {server.url}, keeps everything in {_shown(database)}")
        if token.is_new:
            say(f"its token, shown this once and kept in {directory / FILE}: {token.value}")
        await stop.asked.wait()
        say("store stops")
        await to_thread.run_sync(server.close)


def _keys_of(token: str) -> Callable[[str, str], AttemptId | None]:
    return lambda key, run: keys.read(key, keys.secret_of(token, run))


def _shown(database: str) -> str:
    """Without the password that a URL may have."""
    return re.sub(r"://[^@/]*@", "://...@", database)


# ------------------------------------------------------------------- what is kept


def retain(args: argparse.Namespace) -> int:
    """`whet store size`, `vacuum`, `prune`, `drop`, `export`, `import`."""
    act: Callable[[argparse.Namespace, Store], Awaitable[None]] = ACTIONS[args.action]
    run_async(_act, act, args)
    return 0


async def _act(
    act: Callable[[argparse.Namespace, Store], Awaitable[None]], args: argparse.Namespace
) -> None:
    if args.store is None:
        opened = open_database(_database(args), run=args.run_name or DEFAULT_RUN)
    elif args.db is None:
        place = await place_of(args)
        opened = open_store(place.address, run=place.run, token=place.token)
    else:
        raise ConfigError("--db and --store name two stores: leave one out")
    async with opened as store:
        await act(args, store)


def _database(args: argparse.Namespace) -> str:
    database = args.db or str(Path(args.dir) / DATABASE)
    if "://" not in database and not Path(database).exists():
        raise ConfigError(f"there is no store {database!r}: name it with --db, --dir or --store")
    return database


async def _size(args: argparse.Namespace, store: Store) -> None:
    say(f"{'run':<32} {'rollouts':>9} {'attempts':>9} {'calls':>9} {'spans':>9} {'MB':>9}")
    for run, size in (await store.size()).items():
        if args.run_name in (None, run):
            counts = f"{size.rollouts:>9} {size.attempts:>9} {size.calls:>9} {size.spans:>9}"
            say(f"{run:<32} {counts} {size.bytes / 1e6:>9.1f}")


async def _vacuum(args: argparse.Namespace, store: Store) -> None:
    await store.vacuum()
    say("vacuumed")


async def _prune(args: argparse.Namespace, store: Store) -> None:
    before = time.time() - _seconds(args.older_than)
    for run in await _runs(args, store):
        say(f"{run}: pruned {await store.for_run(run).prune(before)} rollouts")


async def _runs(args: argparse.Namespace, store: Store) -> list[str]:
    known = list(await store.size())
    if args.run_name is None:
        return known
    if args.run_name not in known:
        raise StoreError(
            f"there is no run {args.run_name!r} in this store: `whet store size` lists them"
        )
    return [args.run_name]


async def _drop(args: argparse.Namespace, store: Store) -> None:
    await _runs(args, store)
    await store.drop()
    say(f"dropped {args.run_name}")


async def _export(args: argparse.Namespace, store: Store) -> None:
    await _runs(args, store)
    await store.export(Path(args.file))
    say(f"exported {args.run_name} to {args.file}")


async def _import(args: argparse.Namespace, store: Store) -> None:
    await store.load(Path(args.file))
    say(f"imported {args.file} as {args.run_name}")


ACTIONS = {
    "size": _size,
    "vacuum": _vacuum,
    "prune": _prune,
    "drop": _drop,
    "export": _export,
    "import": _import,
}


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if found is None:
        raise ConfigError(f"an age is a number with s, m, h, d or w, such as 7d; found {text!r}")
    return float(found[1]) * UNITS[found[2]]
