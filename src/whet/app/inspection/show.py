"""`whet show`: the rollouts of a run, with calls, tokens, rewards, advantages and failures."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.algorithms import DISTILLATION, build_algorithm, is_custom
from whet.app.cli.flags import DEFAULT_DIR, CommandParser
from whet.app.inspection.attempt_view import (
    Advantages,
    AttemptView,
    draw_attempt,
    read_attempt,
)
from whet.app.run_folder import RunFolder
from whet.errors import ConfigError
from whet.protocols import Store
from whet.types import RolloutRecord, Status, StepRecord, Trajectory

PAGE = 500
"""Rollouts read at a time."""


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet show`."""
    parser.usage = "whet show RUN [--step N] [--worst | --failed | --rollout ID] [options]"
    group = parser.group("what to show")
    group.add_argument("name", metavar="RUN", help="a run, by name or folder")
    group.add_argument("--step", type=int, metavar="N", help="a step from 1 on (default last)")
    only = group.add_mutually_exclusive_group()
    only.add_argument("--worst", action="store_true", help="rollouts with the least reward")
    only.add_argument("--failed", action="store_true", help="failed rollouts, with tracebacks")
    only.add_argument("--rollout", metavar="ID", help="one rollout")
    group.add_argument("--limit", type=int, default=3, metavar="N", help="rollouts (default 3)")
    group.add_argument(
        "--dir", default=DEFAULT_DIR, metavar="DIR", help=f"folder of runs (default {DEFAULT_DIR})"
    )
    group.add_argument("--store", metavar="URL", help="store of a run of several processes")
    parser.group("output").add_argument(
        "--json", action="store_true", help="print one JSON object instead"
    )
    parser.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> int:
    """Run `whet show`."""
    folder = RunFolder.find(args.name, Path(args.dir))
    found = anyio.run(_read, folder, args)
    if args.json:
        sys.stdout.write(json.dumps(found.as_json(), ensure_ascii=False) + "\n")
    else:
        _print(Console(), folder, found)
    return 0


@dataclass(frozen=True, slots=True)
class Shown:
    """The attempts of a run that are shown, with their advantages."""

    views: Sequence[AttemptView]
    advantages: Advantages
    step: StepRecord | None = None
    """The step whose rollouts are listed; None if attempts are shown whole."""

    def advantage(self, view: AttemptView) -> float | None:
        """Mean advantage of an attempt's generations; None without credit."""
        found = [self.advantages[id] for id in view.generation_ids if id in self.advantages]
        return fmean(fmean(a) if isinstance(a, tuple) else a for a in found) if found else None

    def as_json(self) -> dict[str, object]:
        """Everything except the token ids, which are in the store."""
        return {
            "step": self.step and self.step.step + 1,
            "attempts": [
                view.as_json() | {"rollout": view.rollout.id, "advantage": self.advantage(view)}
                for view in self.views
            ],
        }


async def _read(folder: RunFolder, args: argparse.Namespace) -> Shown:
    async with folder.open_records(args.store) as store:
        steps, records = await store.steps(), await _read_rollouts(store)
        if args.failed:
            failed = [id for id, record in records.items() if record.status is Status.FAILED]
            views = [await read_attempt(store, records[id].rollout) for id in failed[: args.limit]]
            return Shown(views, {})
        if args.rollout:
            if args.rollout not in records:
                raise ConfigError(f"the run has no rollout {args.rollout!r}: --step lists them")
            step = next((each for each in steps if args.rollout in each.consumed), None)
            views = [await read_attempt(store, records[args.rollout].rollout)]
            return Shown(views, await _read_advantages(folder, steps, step, store))
        step = _choose_step(steps, args.step, folder)
        advantages = await _read_advantages(folder, steps, step, store)
        views = [await read_attempt(store, records[id].rollout) for id in step.consumed]
        if not args.worst:
            return Shown(views, advantages, step)
        views.sort(key=lambda view: (view.record.failure is not None, view.record.reward or 0.0))
        return Shown(views[: args.limit], advantages)


async def _read_rollouts(store: Store) -> dict[str, RolloutRecord]:
    found: dict[str, RolloutRecord] = {}
    last: str | None = None
    while page := await store.rollouts(after=last, limit=PAGE):
        found |= {record.rollout.id: record for record in page}
        last = page[-1].rollout.id
    return found


def _choose_step(steps: Sequence[StepRecord], number: int | None, folder: RunFolder) -> StepRecord:
    if not steps:
        raise ConfigError(
            f"the run {folder.path.name!r} has no finished step: --failed shows failed rollouts, "
            "--rollout one by its id"
        )
    if not 1 <= (number or 1) <= len(steps):
        raise ConfigError(f"invalid --step {number}: the run has steps 1 to {len(steps)}")
    return steps[number - 1 if number else -1]


async def _read_advantages(
    folder: RunFolder, steps: Sequence[StepRecord], step: StepRecord | None, store: Store
) -> Advantages:
    """Assign the credit of a step again: it is a function of its rollouts and the steps before."""
    config = folder.config()
    if step is None or config.algorithm.name == DISTILLATION or is_custom(config.algorithm.name):
        return {}
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in await store.trajectories(step.consumed):
        groups.setdefault(trajectory.attempt.rollout.group, []).append(trajectory)
    algorithm = build_algorithm(config)
    credits = await algorithm.credit(list(groups.values()), steps[: step.step])
    return {id: value for credit in credits for id, value in credit.advantages.items()}


def _print(console: Console, folder: RunFolder, shown: Shown) -> None:
    for view in shown.views if shown.step is None else ():
        console.print(draw_attempt(view, shown.advantages))
    if not shown.views:
        console.print("no such rollouts")
    if shown.step is None:
        return
    config = folder.config()
    console.print(f"run {folder.path}: {config.model}, step {shown.step.step + 1}", highlight=False)
    table = Table()
    for title in ("rollout", "reward", "advantage", "calls", "forks", "tokens", "seconds"):
        table.add_column(title, justify="left" if title == "rollout" else "right")
    table.add_column("failure", overflow="fold")
    for view in shown.views:
        record, advantage = view.record, shown.advantage(view)
        forks = sum(call.origin.fork is not None for call in view.calls)
        table.add_row(
            view.rollout.id,
            "-" if record.reward is None else f"{record.reward:.3g}",
            "-" if advantage is None else f"{advantage:+.3f}",
            str(len(view.calls)),
            str(forks),
            str(view.sampled_tokens),
            f"{view.seconds:.1f}",
            Text(record.failure.message if record.failure else ""),
        )
    console.print(table)
    name = folder.path.name
    console.print(
        f"whole attempts: whet show {name} --worst, --failed, or --rollout ID", highlight=False
    )
