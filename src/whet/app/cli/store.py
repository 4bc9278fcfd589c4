"""`whet store`: serve a run's database to its other processes, and maintain it."""

import argparse
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from anyio import to_thread

from whet.app.cli.flags import CommandParser, add_dir_flag, add_listen_flags, add_run_flag
from whet.app.composition.distributed import (
    DATABASE,
    PORT,
    find_store,
    print_line,
    raise_file_limit,
)
from whet.app.dashboard.serving import StorePages
from whet.errors import ConfigError, StoreError
from whet.gateway import auth
from whet.io.process import follow_supervisor, handle_stop_signals
from whet.io.text import hide_passwords
from whet.io.threads import run_async
from whet.protocols import Store
from whet.store import DEFAULT_RUN, open_database, open_store
from whet.store.http.server import StoreServer
from whet.store.http.token import FILE, make_token
from whet.types import AttemptId

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

HELP = {
    "size": "list the runs with their counts and sizes",
    "vacuum": "return the space of deleted records to the disk",
    "prune": "delete the calls and spans of rollouts that ended long ago",
    "drop": "delete a run",
    "export": "write a run to a file",
    "import": "read a run from a file that `export` wrote",
}


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet store`, and those of its actions."""
    parser.usage = "whet store [ACTION] [options]"
    actions = parser.add_subparsers(
        metavar="ACTION",
        parser_class=CommandParser,
        prog=parser.prog,
        title="actions (default: serve)",
    )
    group = parser.group("store")
    group.add_argument(
        "--db",
        metavar="DB",
        help="SQLite file, or postgresql://... (default store.db in --dir)",
    )
    add_listen_flags(group, PORT)
    add_dir_flag(group, has_token=True)
    parser.set_defaults(run=run_store)
    for action, about in HELP.items():
        below = actions.add_parser(action, help=about, description=f"{about.capitalize()}.")
        _add_action_flags(below, action)


def _add_action_flags(parser: CommandParser, action: str) -> None:
    group = parser.group("store")
    if action in ("export", "import"):
        group.add_argument("file", metavar="FILE", help="file to write, or to read")
    if action == "prune":
        group.add_argument(
            "--older-than", required=True, metavar="AGE", help="age with a unit, such as 7d or 12h"
        )
    group.add_argument("--db", metavar="DB", help="SQLite file (default store.db in --dir)")
    group.add_argument("--store", metavar="URL", help="a running `whet store` instead of --db")
    add_run_flag(parser, required=action in ("drop", "export", "import"))
    add_dir_flag(group, has_token=True)
    parser.set_defaults(run=run_action, action=action)


def run_store(args: argparse.Namespace) -> int:
    """Serve the store until SIGTERM or Ctrl-C."""
    follow_supervisor()
    raise_file_limit()
    run_async(_serve, args)
    return 0


async def _serve(args: argparse.Namespace) -> None:
    directory = Path(args.dir)
    token = make_token(directory)
    database = args.db or str(directory / DATABASE)
    async with handle_stop_signals() as stop, open_database(database) as store:
        pages = StorePages(store, directory, token=token.value, host=args.host)
        server = StoreServer(
            store,
            token=token.value,
            host=args.host,
            port=args.port,
            read_key=_make_key_reader(token.value),
            wrap=pages.wrap,
        )
        print_line(f"store listens at {server.url}, database {hide_passwords(database)}")
        if token.is_new:
            print_line(f"new token, written to {directory / FILE}: {token.value}")
        print_line(f"dashboard {pages.create_link(server.url)}")
        await stop.requested.wait()
        print_line("stopping the store")
        pages.close()
        await to_thread.run_sync(server.close)


def _make_key_reader(token: str) -> Callable[[str, str], AttemptId | None]:
    return lambda key, run: auth.read_key(key, auth.derive_secret(token, run))


# ------------------------------------------------------------------- actions


def run_action(args: argparse.Namespace) -> int:
    """Run an action of `whet store` on its database."""
    act: Callable[[argparse.Namespace, Store], Awaitable[None]] = ACTIONS[args.action]
    if args.action == "import" and not Path(args.file).is_file():  # before it makes a database
        raise ConfigError(f"{args.file!r} cannot be imported: there is no such file")
    run_async(_open_and_run, act, args)
    return 0


async def _open_and_run(
    act: Callable[[argparse.Namespace, Store], Awaitable[None]], args: argparse.Namespace
) -> None:
    own = _find_own_store(args)
    args.is_own = own is not None
    if own is not None:
        opened = open_database(str(own), run=DEFAULT_RUN)
    elif args.store is None:
        opened = open_database(_find_database(args), run=args.run_name or DEFAULT_RUN)
    elif args.db is None:
        address = await find_store(args.store, args.run_name, Path(args.dir))
        opened = open_store(address.url, run=address.run, token=address.token)
    else:
        raise ConfigError("found --db and --store: leave one out")
    async with opened as store:
        await act(args, store)


def _find_own_store(args: argparse.Namespace) -> Path | None:
    """The store of a run that was trained without `whet store`, in the run's folder."""
    if args.store or args.db or not args.run_name or args.action in ("drop", "import"):
        return None
    own = Path(args.dir) / "runs" / args.run_name / DATABASE
    return own if own.is_file() else None


def _find_database(args: argparse.Namespace) -> str:
    database = args.db or str(Path(args.dir) / DATABASE)
    may_be_new = args.action == "import" and args.db
    if "://" in database or may_be_new or Path(database).exists():
        return database
    runs = Path(args.dir) / "runs"
    found, hint = f"no store at {database!r}", "a run without `whet store` has its own: --run NAME"
    if args.action == "drop" and (runs / args.run_name).is_dir():
        hint = f"`whet clean {args.run_name}` deletes a run's folder"
    elif args.run_name and args.action != "import":
        found += f", and none of a run {args.run_name!r} in {str(runs)!r}"
        hint = "`whet runs` lists the runs of a folder"
    raise ConfigError(f"{found}: name it with --db, --dir or --store; {hint}")


async def _print_sizes(args: argparse.Namespace, store: Store) -> None:
    print_line(f"{'run':<32} {'rollouts':>9} {'attempts':>9} {'calls':>9} {'spans':>9} {'MB':>9}")
    for run, size in (await store.size()).items():
        name = _name_run(args, run)
        if args.run_name in (None, name):
            counts = f"{size.rollouts:>9} {size.attempts:>9} {size.calls:>9} {size.spans:>9}"
            print_line(f"{name:<32} {counts} {size.bytes / 1e6:>9.1f}")


def _name_run(args: argparse.Namespace, run: str) -> str:
    """The name of a run of the store: in a store of its own it is that of its folder."""
    return args.run_name if args.is_own else run


async def _vacuum(args: argparse.Namespace, store: Store) -> None:
    await store.vacuum()
    print_line("vacuumed")


async def _prune(args: argparse.Namespace, store: Store) -> None:
    before = time.time() - _parse_age(args.older_than)
    for run in await _select_runs(args, store):
        print_line(
            f"{_name_run(args, run)}: pruned {await store.for_run(run).prune(before)} rollouts"
        )


async def _select_runs(args: argparse.Namespace, store: Store) -> list[str]:
    known = list(await store.size())
    if args.run_name is None or args.is_own:
        return known
    if args.run_name not in known:
        raise StoreError(
            f"unknown run {args.run_name!r} in this store: `whet store size` lists the runs"
        )
    return [args.run_name]


async def _drop(args: argparse.Namespace, store: Store) -> None:
    await _select_runs(args, store)
    await store.drop()
    print_line(f"dropped {args.run_name}")


async def _export(args: argparse.Namespace, store: Store) -> None:
    await _select_runs(args, store)
    await store.export(Path(args.file))
    print_line(f"exported {args.run_name} to {args.file}")


async def _import(args: argparse.Namespace, store: Store) -> None:
    await store.load(Path(args.file))
    print_line(f"imported {args.file} as {args.run_name}")


ACTIONS = {
    "size": _print_sizes,
    "vacuum": _vacuum,
    "prune": _prune,
    "drop": _drop,
    "export": _export,
    "import": _import,
}


def _parse_age(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if found is None:
        raise ConfigError(
            f"invalid age {text!r}: expected a number with s, m, h, d or w, such as 7d"
        )
    return float(found[1]) * UNITS[found[2]]
