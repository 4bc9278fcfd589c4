"""`whet view`: look at runs in a browser, in the terminal, or in one HTML file."""

import argparse
import sys
from pathlib import Path

from whet.app.cli.display import open_console
from whet.app.cli.flags import CommandParser, add_dir_flag, add_listen_flags
from whet.app.composition.distributed import print_line
from whet.app.dashboard.pages.payload import to_browser_json
from whet.app.dashboard.run_catalog import FolderCatalog
from whet.app.dashboard.serving import Dashboard, make_link
from whet.app.dashboard.static_report import write_html
from whet.app.dashboard.store_session import request_code
from whet.app.dashboard.terminal import draw_frame, read_frame, watch_run
from whet.app.inspection.run_list import find_newest
from whet.app.run_folder import RunFolder
from whet.errors import ConfigError
from whet.io.process import handle_stop_signals
from whet.io.threads import run_async

PORT = 4748


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet view`."""
    parser.usage = "whet view [RUN] [options]"
    group = parser.group("what to show")
    group.add_argument(
        "name",
        nargs="?",
        metavar="RUN",
        help="a run, by name or folder (default: all; for --tui, --html and --json the newest)",
    )
    add_dir_flag(group)
    group.add_argument(
        "--store", metavar="URL", help="print a new link to the dashboard of a running `whet store`"
    )
    where = parser.group("where to show it (default: in a browser)")
    only = where.add_mutually_exclusive_group()
    only.add_argument("--tui", action="store_true", help="in the terminal, live")
    only.add_argument("--html", metavar="FILE", help="write one HTML file that needs no server")
    only.add_argument("--json", action="store_true", help="print one JSON object")
    server = parser.group("server")
    add_listen_flags(server, PORT, ", or a free one if it is taken")
    server.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer to this host name too, such as that of a proxy; may be repeated",
    )
    parser.set_defaults(run=run_view)


def run_view(args: argparse.Namespace) -> int:
    """Run `whet view`."""
    if args.store is not None:
        url, code = run_async(request_code, args.store, Path(args.dir))
        print_line(make_link(url, code, args.name))
        return 0
    directory, name = _find(args.name, Path(args.dir))
    if args.html:
        size = run_async(_write, directory, name or find_newest(directory), Path(args.html))
        print_line(f"{args.html}: {size / 1e6:.1f} MB")
    elif args.tui or args.json:
        run_async(_show, directory, name or find_newest(directory), args.json)
    else:
        run_async(_serve, args, directory, name)
    return 0


def _find(name: str | None, directory: Path) -> tuple[Path, str | None]:
    """Return the directory of runs and the name of the run. Raises ConfigError."""
    if name is None:
        return directory, None
    folder = RunFolder.find(name, directory).path.resolve()
    return folder.parent.parent, folder.name


async def _serve(args: argparse.Namespace, directory: Path, name: str | None) -> None:
    async with handle_stop_signals() as stop:
        dashboard = _listen(args, directory)
        try:
            print_line(f"dashboard {dashboard.create_link(name)}")
            print_line("the link works once, in one browser; Ctrl-C stops the server")
            await stop.requested.wait()
        finally:
            dashboard.close()


def _listen(args: argparse.Namespace, directory: Path) -> Dashboard:
    catalog = FolderCatalog(directory)
    try:
        return Dashboard(catalog, host=args.host, port=args.port, allowed=args.allow_host)
    except ConfigError:
        if args.port != PORT:  # a port that was asked for
            raise
        return Dashboard(catalog, host=args.host, allowed=args.allow_host)


async def _write(directory: Path, name: str, file: Path) -> int:
    catalog = FolderCatalog(directory)
    try:
        return await write_html(catalog, name, file)
    except OSError as error:
        raise ConfigError(f"cannot write {str(file)!r}: {error.strerror}") from error
    finally:
        await catalog.close()


async def _show(directory: Path, name: str, as_json: bool) -> None:
    catalog = FolderCatalog(directory)
    console = open_console()
    try:
        run = await catalog.open(name)
        if as_json:
            sys.stdout.write(to_browser_json(await read_frame(run)).decode() + "\n")
        elif console.is_terminal:
            await watch_run(run, console)
        else:
            console.print(draw_frame(await read_frame(run), console.width))
    finally:
        await catalog.close()
