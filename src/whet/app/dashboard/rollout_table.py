"""`whet rollouts`: the list of rollouts that the dashboard shows, in the terminal or as JSON."""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from whet.app.cli.display import open_console
from whet.app.cli.flags import CommandParser, add_dir_flag
from whet.app.dashboard.pages.overview import read_run
from whet.app.dashboard.pages.payload import to_browser_json
from whet.app.dashboard.pages.rollout_list import RolloutQuery, read_rollouts
from whet.app.dashboard.run_catalog import FolderCatalog
from whet.app.dashboard.store_session import open_session
from whet.app.inspection.run_list import (
    build_narrow_table,
    choose_model,
    find_newest,
    print_rows,
)
from whet.app.run_folder import RunFolder
from whet.errors import ConfigError
from whet.io.text import escape_control_characters
from whet.io.threads import run_async
from whet.store.queries.rollout_pages import Order

PAGE = 200
MIN_TASK = 12
"""Characters of a line that are left for its task; the tasks are left out where there are fewer."""
FILTERS = (
    *("status", "mode", "group", "step", "agent", "policy", "text", "task"),
    *("min_reward", "max_reward"),
)

ListedRows = list[dict[str, Any]]  # Any: the answers of the dashboard's API


class Listing(NamedTuple):
    """The rollouts that a query finds."""

    rows: ListedRows
    judged: bool
    """Whether training adds the scores of a judge to their rewards."""
    cut_off: bool
    """Whether the limit ended the list."""


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet rollouts`."""
    parser.usage = "whet rollouts [RUN] [--failed] [options]"
    group = parser.group("which rollouts")
    group.add_argument(
        "name", nargs="?", metavar="RUN", help="a run, by name or folder (default: the newest)"
    )
    group.add_argument("--model", metavar="NAME", help="only those of this model of an evaluation")
    only = group.add_mutually_exclusive_group()
    only.add_argument("--failed", action="store_true", help="only those that failed")
    only.add_argument("--status", metavar="STATUS", help="queued, running, succeeded or failed")
    group.add_argument("--mode", metavar="MODE", help="train, val or test")
    group.add_argument("--step", type=int, metavar="N", help="of this step, from 1")
    group.add_argument("--group", metavar="ID", help="of a group")
    group.add_argument("--task", metavar="ROLLOUT", help="with the same task as this rollout")
    group.add_argument("--agent", metavar="NAME", help="with a call of this agent")
    group.add_argument("--policy", metavar="NAME", help="with a call of this policy")
    group.add_argument("--text", metavar="TEXT", help="with this text in task, messages or failure")
    group.add_argument("--min-reward", type=float, metavar="X", help="with at least this reward")
    group.add_argument("--max-reward", type=float, metavar="X", help="with at most this reward")
    group.add_argument("--forked", action="store_true", help="with a call that forked")
    group.add_argument(
        "--order",
        choices=get_args(Order),
        default="newest",
        help="newest, oldest, best or worst first (default newest)",
    )
    group.add_argument(
        "--limit", type=int, default=20, metavar="N", help="rollouts to list (default 20)"
    )
    add_dir_flag(group)
    group.add_argument("--store", metavar="URL", help="ask a running `whet store` instead")
    parser.group("output").add_argument(
        "--json", action="store_true", help="print one JSON array instead of a table"
    )
    parser.add_examples(
        "whet rollouts mine --step 3 --max-reward 0",
        "whet rollouts mine --text Paris --json",
    )
    parser.set_defaults(run=run_rollouts)


def run_rollouts(args: argparse.Namespace) -> int:
    """Run `whet rollouts`."""
    if args.limit < 1:
        raise ConfigError(f"invalid --limit {args.limit}: expected at least 1")
    query = {name: value for name in FILTERS if (value := getattr(args, name)) is not None}
    query |= {"order": args.order, "forked": args.forked}
    if args.failed:
        query["status"] = "failed"
    _parse(query)  # before anything is opened
    if args.name is None and args.store is not None:
        raise ConfigError("found no RUN, expected the name of a run of the store")
    if args.model is not None and args.store is not None:
        raise ConfigError("found --model and --store: evaluations are not in a shared store")
    run = args.name or find_newest(Path(args.dir))
    if args.store is None:
        folder = RunFolder.find(run, Path(args.dir))
        model = choose_model(folder, args.model)
        found = run_async(_read_folder, folder.path.resolve(), model, query, args.limit)
    else:
        found = run_async(_read_store, args.store, run, Path(args.dir), query, args.limit)
    if args.json:
        sys.stdout.write(to_browser_json(found.rows).decode() + "\n")
    else:
        model = f" --model {args.model}" if args.model else ""
        _print(open_console(), f"{run}{model}", found)
    return 0


def _parse(query: dict[str, Any]) -> RolloutQuery:
    try:
        return RolloutQuery.model_validate(query)
    except ValidationError as error:
        first = error.errors()[0]
        flag = str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"invalid --{flag}: {first['msg'].lower()}") from error


async def _read_folder(
    folder: Path, model: str | None, query: dict[str, Any], limit: int
) -> Listing:
    catalog = FolderCatalog(folder.parent.parent)
    rows: ListedRows = []
    judged = False
    after: object = None
    try:
        run = await catalog.open(folder.name)
        if model is not None:
            run = run._replace(store=run.store.for_run(model))
        while len(rows) < limit:  # a search is answered in parts
            part = query | {"after": after, "limit": min(PAGE, limit - len(rows))}
            page: dict[str, Any] = await read_rollouts(run, _parse(part))
            rows += page["rollouts"]
            judged = judged or bool(page["judged"])
            after = page["next"]
            if after is None:
                break
        if not rows:
            _check_filters(query, await read_run(run))
    finally:
        await catalog.close()
    return Listing(rows, judged, after is not None)


async def _read_store(
    store: str, name: str, directory: Path, query: dict[str, Any], limit: int
) -> Listing:
    rows: ListedRows = []
    judged = False
    after: dict[str, Any] = {}
    async with open_session(store, directory) as session:
        while len(rows) < limit:
            part = {**query, **after, "limit": min(PAGE, limit - len(rows))}
            page: dict[str, Any] = await session.get(f"/api/runs/{name}/rollouts", part)
            rows += page["rollouts"]
            judged = judged or bool(page["judged"])
            after = {"after": page["next"]}
            if page["next"] is None:
                break
        if not rows:
            _check_filters(query, await session.get(f"/api/runs/{name}", {}))
    return Listing(rows, judged, after["after"] is not None)


def _check_filters(query: dict[str, Any], run: dict[str, Any]) -> None:
    """Raise ConfigError if a run has no such step or policy: the list is empty by a mistake."""
    step, last = query.get("step", 0), run["steps"]
    if step > last:
        found = f"steps 1 to {last}" if last else "no finished step"
        raise ConfigError(f"invalid --step {step}: the run has {found}")
    policy, config = query.get("policy"), run["config"]
    if policy is None or config is None:  # its folder is on another machine
        return
    policies = config.get("policies", {})
    if policy not in policies:
        found = f"policies {', '.join(policies)}" if policies else "one policy, without a name"
        raise ConfigError(f"invalid --policy {policy!r}: the run has {found}")


def _build_table(rows: ListedRows, *, with_tasks: bool) -> Table:
    table = build_narrow_table("rollout")
    table.add_column("status", no_wrap=True)
    forks = ["forks"] if any(row["forks"] for row in rows) else []
    for title in ("reward", "step", "calls", *forks, "tokens", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    if with_tasks:
        table.add_column("task", no_wrap=True, overflow="ellipsis", ratio=1)
        table.expand = True  # the last column has the rest of each line
    for row in rows:
        table.add_row(
            Text(row["id"]),
            row["status"],
            "-" if row["reward"] is None else f"{row['reward']:.3g}",
            "-" if row["step"] is None else str(row["step"]),
            str(row["calls"]),
            *([str(row["forks"] or "")] if forks else []),
            str(row["sampled_tokens"]),
            "-" if row["seconds"] is None else f"{row['seconds']:.1f}",
            *([Text(escape_control_characters(str(row["task"]))[:200])] if with_tasks else []),
        )
    return table


def _print(console: Console, run: str, found: Listing) -> None:
    """Print a listing; `run` names the run to `whet show`."""
    rows = found.rows
    if not rows:
        console.print("no such rollouts")
        return
    table = _build_table(rows, with_tasks=False)
    if console.width - Measurement.get(console, console.options, table).maximum >= MIN_TASK:
        table = _build_table(rows, with_tasks=True)
    failures = [row["failure"] for row in rows]
    print_rows(console, table, [f and f"{f['kind']}: {f['message']}" for f in failures])
    if found.judged:
        console.print(
            "reward: the agent's own, without the scores of the judge, which training adds",
            highlight=False,
        )
    if found.cut_off:
        console.print(f"these are {len(rows)}: a higher --limit lists more", highlight=False)
    console.print(f"all of one rollout: whet show {run} --rollout ID", highlight=False)
