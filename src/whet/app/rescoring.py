"""`whet rescore`: score the stored rollouts of a run again, with another reward or judge.

The store is only read: what was trained, and the rewards it was trained with, stay as they are.
"""

import argparse
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
from anyio import to_thread
from pydantic import JsonValue
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.app.cli.display import open_console
from whet.app.cli.flags import CommandParser, add_dir_flag
from whet.app.evaluation.statistics import correlate
from whet.app.run_folder import RunFolder
from whet.errors import ConfigError, WhetError, boundary
from whet.io.files import atomic_file
from whet.io.paging import iterate_pages
from whet.protocols import Store
from whet.runners.agent import await_result
from whet.runners.context import check_reward
from whet.runners.judges.judge import Judge
from whet.runners.judges.prompts import read_answer
from whet.runners.loading import load_function
from whet.types import Mode, Trajectory

PARAMETERS = ("task", "answer", "trajectory", "reward")
"""Parameters that a reward function may have."""

RescoringFunction = Callable[..., Any]
"""Any: its result is checked; see `PARAMETERS`."""


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet rescore`."""
    parser.usage = "whet rescore RUN --reward FILE:FUNCTION [options]"
    group = parser.group("what to score")
    group.add_argument("name", metavar="RUN", help="a run, by name or folder")
    group.add_argument(
        "--reward",
        required=True,
        metavar="FUNCTION",
        help="file.py:name of a function with parameters among task, answer, trajectory, reward; "
        "or of a whet.judge",
    )
    group.add_argument(
        "--mode",
        choices=["train", "val", "all"],
        default="all",
        help="rollouts to score (default all)",
    )
    group.add_argument(
        "--failed", action="store_true", help="also rollouts that failed after a model call"
    )
    group.add_argument(
        "--concurrency",
        type=int,
        default=16,
        metavar="N",
        help="rollouts to score at once (default 16)",
    )
    add_dir_flag(group)
    group.add_argument("--store", metavar="URL", help="store of a run of several processes")
    output = parser.group("output")
    output.add_argument(
        "--results", metavar="FILE", help="JSON lines (default rescored-NAME.jsonl of the run)"
    )
    output.add_argument(
        "--limit", type=int, default=5, metavar="N", help="largest changes to list (default 5)"
    )
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run_rescore)


def run_rescore(args: argparse.Namespace) -> int:
    """Run `whet rescore`."""
    if args.concurrency < 1:
        raise ConfigError(f"invalid --concurrency {args.concurrency}: expected at least 1")
    reward = load_reward(args.reward)
    folder = RunFolder.find(args.name, Path(args.dir))
    scored = anyio.run(_rescore, folder, reward, args)
    if not scored:
        raise ConfigError(
            f"the run {folder.path.name!r} has no such rollouts to score: choose another --mode, "
            "or add --failed"
        )
    name = args.reward.rpartition(":")[2]
    results = Path(args.results) if args.results else folder.path / f"rescored-{name}.jsonl"
    _write(results, scored)
    summary = summarize(scored)
    if args.json:
        sys.stdout.write(json.dumps({**summary, "results": str(results)}) + "\n")
    else:
        _print(open_console(), summary, scored, args.limit)
        sys.stdout.write(f"every score: {results}\n")
    if all(each.new is None for each in scored):
        sys.stderr.write(f"whet: no rollout was scored, such as: {scored[0].problem}\n")
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class Rescored:
    """A rollout with its stored reward and the new one."""

    rollout: str
    group: str
    mode: str
    old: float | None
    """None if the rollout failed."""
    new: float | None
    """None if the new reward raised, or was not a number."""
    problem: str = ""


def load_reward(spec: str) -> RescoringFunction:
    """Load a reward function by name, or a judge as one.

    Raises:
        ConfigError: it is neither, or it has an unknown parameter.
    """
    found = load_function(spec, "reward")
    if isinstance(found, Judge):
        judge = found
        if judge.needs_gateway():
            raise ConfigError(
                f"the judge {spec!r} has no base_url, which it needs here: give it one"
            )

        async def score(task: JsonValue, answer: str) -> float:
            return (await judge.score(answer, task=task)).score

        return score
    if not callable(found):
        raise ConfigError(f"expected a function or a judge, found {type(found).__name__} {spec!r}")
    try:
        parameters = inspect.signature(found).parameters.items()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the reward {spec!r} has no signature, as some functions in C: call it in a function "
            f"with parameters among {', '.join(PARAMETERS)}"
        ) from error
    unknown = [
        name
        for name, each in parameters
        if (name not in PARAMETERS or each.kind is each.POSITIONAL_ONLY)
        and each.kind is not each.VAR_KEYWORD
        and each.default is each.empty
    ]
    if unknown:
        raise ConfigError(
            f"the reward {spec!r} has an unknown parameter {unknown[0]!r}; expected one of "
            f"{', '.join(PARAMETERS)}"
        )
    return found


async def _rescore(
    folder: RunFolder, reward: RescoringFunction, args: argparse.Namespace
) -> list[Rescored]:
    modes = list(Mode) if args.mode == "all" else [Mode(args.mode)]
    scored: list[Rescored] = []
    async with folder.open_records(args.store) as store:
        for mode in modes:
            scored += await rescore(
                store, reward, mode, failed=args.failed, concurrency=args.concurrency
            )
    return scored


async def rescore(
    store: Store, reward: RescoringFunction, mode: Mode, *, failed: bool, concurrency: int
) -> list[Rescored]:
    """Score the rollouts of a mode that have ended; the store is only read."""
    found: list[Rescored] = []
    limit = anyio.CapacityLimiter(concurrency)
    async for page in iterate_pages(store, mode=mode):
        ended = {each.rollout.id: each.status for each in page}
        trajectories = await store.trajectories(list(ended), failed=failed)
        scored: dict[str, Rescored] = {}

        async def score(trajectory: Trajectory, scored: dict[str, Rescored] = scored) -> None:
            async with limit:
                each = await _score(trajectory, reward)
                scored[each.rollout] = each

        async with anyio.create_task_group() as tasks:
            for trajectory in trajectories:
                if trajectory.calls:
                    tasks.start_soon(score, trajectory)
        found += [scored[id] for id in ended if id in scored]
    return found


async def _score(trajectory: Trajectory, reward: RescoringFunction) -> Rescored:
    rollout = trajectory.attempt.rollout
    old = None if trajectory.failure else trajectory.reward
    values: Mapping[str, object] = {
        "task": rollout.task,
        "answer": read_answer(trajectory),
        "trajectory": trajectory,
        "reward": old,
    }
    parameters = inspect.signature(reward).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    arguments = {name: values[name] for name in values if takes_all or name in parameters}
    new, problem = None, ""
    try:
        with boundary(WhetError, "the reward raised"):
            if inspect.iscoroutinefunction(reward):
                result = await reward(**arguments)
            else:
                result = await await_result(await to_thread.run_sync(lambda: reward(**arguments)))
        new = check_reward(result)
    except WhetError as error:
        problem = str(error)
    except SystemExit:
        problem = "the reward ended the process: expected it to return a number"
    return Rescored(rollout.id, rollout.group, rollout.mode.value, old, new, problem)


# ------------------------------------------------------------------- results


def summarize(scored: Sequence[Rescored]) -> dict[str, JsonValue]:
    """Means of both rewards, their correlation, and how often they order a pair alike."""
    both = [(each.old, each.new) for each in scored if each.old is not None]
    pairs = [(old, new) for old, new in both if new is not None]
    return {
        "rollouts": len(scored),
        "scored": sum(each.new is not None for each in scored),
        "old": fmean(old for old, _ in pairs) if pairs else None,
        "new": fmean(new for _, new in pairs) if pairs else None,
        "correlation": correlate([old for old, _ in pairs], [new for _, new in pairs]),
        "pairs_ordered_alike": _order_agreement(scored),
    }


def _order_agreement(scored: Sequence[Rescored]) -> float | None:
    """Share of the pairs within a group that both rewards order, in which they agree."""
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for each in scored:
        if each.old is not None and each.new is not None:
            groups[each.group].append((each.old, each.new))
    alike: list[bool] = []
    for members in groups.values():
        for number, (old, new) in enumerate(members):
            for other_old, other_new in members[:number]:
                if old != other_old and new != other_new:
                    alike.append((old > other_old) == (new > other_new))
    return fmean(alike) if alike else None


def _write(file: Path, scored: Sequence[Rescored]) -> None:
    names = Rescored.__slots__
    lines = [json.dumps({name: getattr(each, name) for name in names}) for each in scored]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as partial:
            partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {str(file)!r}: {error.strerror}") from error


def _print(
    console: Console, summary: Mapping[str, JsonValue], scored: Sequence[Rescored], limit: int
) -> None:
    def show(name: str) -> str:
        value = summary[name]
        return "-" if value is None else f"{value:.3f}"

    console.print(
        f"scored {summary['scored']} of {summary['rollouts']} rollouts; mean reward "
        f"{show('old')} before, {show('new')} now; correlation {show('correlation')}; pairs of a "
        f"group ordered alike {show('pairs_ordered_alike')}",
        highlight=False,
    )
    changed = [each for each in scored if each.old is not None and each.new is not None]
    changed.sort(key=lambda each: -abs((each.new or 0.0) - (each.old or 0.0)))
    table = Table(title="largest changes")
    for title in ("rollout", "before", "now", "change"):
        table.add_column(title, justify="left" if title == "rollout" else "right")
    for each in changed[:limit]:
        assert each.old is not None
        assert each.new is not None
        change = each.new - each.old
        table.add_row(Text(each.rollout), f"{each.old:.3f}", f"{each.new:.3f}", f"{change:+.3f}")
    if table.row_count:
        console.print(table)
    if problems := [each.problem for each in scored if each.problem]:
        console.print(
            f"{len(problems)} were not scored, such as: {problems[0]}",
            highlight=False,
            markup=False,
        )
