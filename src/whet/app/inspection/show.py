"""`whet show` and `whet.show`: rollouts of a run, with calls, tokens, advantages and failures."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from whet.app.cli.display import find_checkpoints, format_checkpoints, open_console
from whet.app.cli.flags import DEFAULT_DIR, CommandParser, add_dir_flag
from whet.app.inspection.attempt_view import (
    Advantages,
    AttemptView,
    draw_attempt,
    read_attempt,
)
from whet.app.inspection.run_list import (
    build_narrow_table,
    choose_model,
    find_newest,
    list_runs,
    print_rows,
)
from whet.app.run_folder import RunFolder
from whet.errors import ConfigError, NotFound, StoreError
from whet.io.paging import iterate_pages
from whet.io.threads import run_async
from whet.protocols import Store
from whet.runners.judges.group_ranking import is_ranking
from whet.training.learners import read_versions
from whet.types import NO_ADVANTAGES, Rollout, Status, StepRecord


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet show`."""
    parser.usage = (
        "whet show [RUN] [--step N] [--worst | --failed | --rollout ID] [options]\n"
        "       whet show ROLLOUT [options]"
    )
    group = parser.group("what to show")
    group.add_argument(
        "name",
        nargs="?",
        metavar="RUN",
        help="a run, by name or folder (default: the newest); or a rollout, of the newest run that "
        "has it",
    )
    group.add_argument(
        "--step", type=int, metavar="N", help="number of a step, from 1 (default: the last)"
    )
    group.add_argument("--model", metavar="NAME", help="rollouts of this model of an evaluation")
    only = group.add_mutually_exclusive_group()
    only.add_argument("--worst", action="store_true", help="rollouts with the lowest reward")
    only.add_argument("--failed", action="store_true", help="failed rollouts, with tracebacks")
    only.add_argument("--rollout", metavar="ID", help="one rollout")
    group.add_argument(
        "--limit", type=int, default=3, metavar="N", help="rollouts to show (default 3)"
    )
    add_dir_flag(group)
    group.add_argument("--store", metavar="URL", help="store of a run of several processes")
    parser.group("output").add_argument(
        "--json", action="store_true", help="print one JSON object instead"
    )
    parser.add_examples(
        "whet show mine --step 3",
        "whet show mine --failed --limit 1",
    )
    parser.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> int:
    """Run `whet show`."""
    directory = Path(args.dir)
    folder, rollout = run_async(_find, args.name or find_newest(directory), directory)
    if rollout and (args.step or args.worst or args.failed or args.rollout):
        raise ConfigError(f"{args.name!r} is a rollout: choose among the rollouts of a run instead")
    selection = RolloutSelection(
        args.step, args.worst, args.failed, rollout or args.rollout, args.limit, args.model
    )
    found = run_async(_read, folder, selection, args.store)
    if args.json:
        sys.stdout.write(json.dumps(found.as_json(folder), ensure_ascii=False) + "\n")
    else:
        _print(open_console(), folder, found)
    return 0


def show(
    run: str | Path,
    *,
    step: int | None = None,
    worst: bool = False,
    failed: bool = False,
    rollout: str | None = None,
    limit: int = 3,
    model: str | None = None,
    dir: str | Path = DEFAULT_DIR,
    store: str | None = None,
) -> None:
    """Print the rollouts of a run as `whet show` does: those of its last step, or of `step`.

    `worst` and `failed` print up to `limit` attempts whole, as does a run without a finished step;
    `rollout` prints one by its id. Of an evaluation the rollouts are those of one `model`. The run
    is a folder, or a name in `dir`; `store` is the store of a run of several processes.

    Raises:
        ConfigError: there is no such run, step, rollout or model.
    """
    if worst + failed + (rollout is not None) > 1:
        raise ConfigError("worst, failed and rollout exclude each other: give one of them")
    folder = RunFolder.find(run, Path(dir))
    selection = RolloutSelection(step, worst, failed, rollout, limit, model)
    _print(open_console(), folder, run_async(_read, folder, selection, store))


async def _find(name: str, directory: Path) -> tuple[RunFolder, str | None]:
    """Return a run; or the newest that has a rollout of this name, with that name.

    Raises:
        ConfigError: there is neither.
    """
    try:
        return RunFolder.find(name, directory), None
    except ConfigError as error:
        no_run = error
    for run in list_runs(directory):
        folder = RunFolder(directory / "runs" / run.name)
        with suppress(ConfigError, StoreError):  # no records on this machine
            async with folder.open_records() as store:
                for records in (store, *map(store.for_run, folder.list_models())):
                    with suppress(NotFound):
                        if await records.attempts(name):
                            return folder, name
    raise ConfigError(f"{no_run}; and no run there has such a rollout") from no_run


ENDED = (Status.SUCCEEDED, Status.FAILED)


@dataclass(frozen=True, slots=True)
class RolloutSelection:
    """The rollouts of a run to show."""

    step: int | None
    worst: bool
    failed: bool
    rollout: str | None
    limit: int
    model: str | None


@dataclass(frozen=True, slots=True)
class SelectedAttempts:
    """The attempts of a run that are shown, with their advantages."""

    views: Sequence[AttemptView]
    advantages: Advantages
    step: StepRecord | None = None
    """The step whose rollouts are listed; None if attempts are shown whole."""
    steps: Sequence[StepRecord] = ()
    """All steps of the run, if the rollouts of one are listed."""
    found: int | None = None
    """Rollouts that the selection found, if `views` are the first of them."""

    def compute_advantage(self, view: AttemptView) -> float | None:
        """Mean advantage of an attempt's generations; None without credit."""
        found = [self.advantages[id] for id in view.generation_ids if id in self.advantages]
        return fmean(found) if found else None

    def describe_policies(self, view: AttemptView) -> list[str]:
        """The policies that an attempt called, in a run of several, with their mean advantages."""
        found: dict[str, list[float]] = {}
        for call in view.calls:
            own = found.setdefault(call.origin.policy, [])
            ids = call.generations_by_id
            own += [self.advantages[id] for id in ids if id in self.advantages]
        return [f"{name} {fmean(own):+.3f}" if own else name for name, own in found.items() if name]

    def as_json(self, folder: RunFolder) -> dict[str, object]:
        """Everything except the token ids, which are in the store."""
        kept = find_checkpoints(folder, self.steps)
        return {
            "step": self.step and self.step.step + 1,
            "checkpoints": {number: str(path) for number, path in kept.items()},
            "versions": read_versions(self.step.metrics) if self.step else {},
            "attempts": [
                view.as_json()
                | {"rollout": view.rollout.id, "advantage": self.compute_advantage(view)}
                for view in self.views
            ],
        }


async def _read(
    folder: RunFolder, selection: RolloutSelection, address: str | None
) -> SelectedAttempts:
    if selection.limit < 1:
        raise ConfigError(f"invalid limit {selection.limit}: expected at least 1")
    if selection.rollout and selection.step is not None:
        raise ConfigError("a step and a rollout exclude each other: give one of them")
    model = choose_model(folder, selection.model)
    async with folder.open_records(address) as opened:
        store = opened if model is None else opened.for_run(model)
        steps = await store.steps()
        if selection.rollout:
            views = [await read_attempt(store, await _read_rollout(store, selection.rollout))]
            step = next((each for each in steps if selection.rollout in each.consumed), None)
            return SelectedAttempts(
                views, await store.advantages(step.step) if step else NO_ADVANTAGES
            )
        step = None  # without a finished one, or for failures of the whole run
        if selection.step is not None or (steps and not selection.failed):
            step = _choose_step(steps, selection.step, folder)
        advantages = await store.advantages(step.step) if step else NO_ADVANTAGES
        pages = iterate_pages(store)
        records = {record.rollout.id: record async for page in pages for record in page}
        chosen = [records[id] for id in (step.consumed if step else records)]
        # A rollout that was canceled before it began has no attempt to show.
        chosen = [record for record in chosen if record.status in ENDED and record.attempts]
        if step and not selection.worst and not selection.failed:
            views = [await read_attempt(store, record.rollout) for record in chosen]
            return SelectedAttempts(views, advantages, step, steps)
        if selection.failed:
            chosen = [record for record in chosen if record.status is Status.FAILED]
        if selection.worst:
            chosen.sort(key=lambda record: (record.reward is None, record.reward or 0.0))
        shown = chosen[: selection.limit]
        views = [await read_attempt(store, record.rollout) for record in shown]
        return SelectedAttempts(views, advantages, found=len(chosen))


async def _read_rollout(store: Store, id: str) -> Rollout:
    """Return a rollout that has begun. Raises ConfigError."""
    try:
        attempts = await store.attempts(id)
    except NotFound as error:
        found = f"the run has no rollout {id!r}"
        raise ConfigError.phrase(
            python=found, command=f"{found}: `whet rollouts RUN` lists them"
        ) from error
    if not attempts:
        raise ConfigError(f"the rollout {id!r} has not begun yet: show it once it runs")
    for trajectory in await store.trajectories([id], failed=True):
        return trajectory.attempt.rollout
    # It runs, or waits for another attempt.
    records = {r.rollout.id: r async for page in iterate_pages(store) for r in page}
    return records[id].rollout


def _choose_step(steps: Sequence[StepRecord], number: int | None, folder: RunFolder) -> StepRecord:
    if not steps:
        found = f"the run {folder.path.name!r} has no finished step"
        raise ConfigError.phrase(
            python=f"{found}; failed=True shows its failed rollouts",
            command=f"{found}; --failed shows its failed rollouts",
        )
    if number is not None and not 1 <= number <= len(steps):
        raise ConfigError(f"invalid step {number}: the run has steps 1 to {len(steps)}")
    return steps[number - 1 if number else -1]


def _print(console: Console, folder: RunFolder, selected: SelectedAttempts) -> None:
    if not selected.views:
        console.print("no such rollouts")
    if selected.step is not None:
        _print_step(console, folder, selected, selected.step)
        return
    for view in selected.views:
        console.print(draw_attempt(view, selected.advantages))
    if selected.found is not None and selected.found > len(selected.views):
        shown = f"{len(selected.views)} of {selected.found} rollouts"
        console.print(f"these are {shown}: a higher limit shows more", highlight=False)


def _print_step(
    console: Console, folder: RunFolder, selected: SelectedAttempts, step: StepRecord
) -> None:
    config = folder.read_config()
    line = f"run {folder.path}: {config.model}, step {step.step + 1}"
    if versions := read_versions(step.metrics):
        numbered = ", ".join(f"{name} {version}" for name, version in versions.items())
        line += f"; versions of the policies: {numbered}"
    console.print(line, highlight=False, soft_wrap=True)
    table = build_narrow_table("rollout")
    for title in ("reward", "advantage", "calls", "forks", "tokens", "seconds"):
        table.add_column(title, justify="right", overflow="ellipsis")  # before the rollout is
    if config.policies:
        table.add_column("policies", no_wrap=True)
    for view in selected.views:
        record, advantage = view.record, selected.compute_advantage(view)
        forks = sum(call.origin.fork is not None for call in view.calls)
        table.add_row(
            view.rollout.id,
            "-" if record.reward is None else f"{record.reward:.3g}",
            "-" if advantage is None else f"{advantage:+.3f}",
            str(len(view.calls)),
            str(forks),
            str(view.sampled_tokens),
            f"{view.seconds:.1f}",
            *([", ".join(selected.describe_policies(view))] if config.policies else []),
        )
    failures = [view.record.failure for view in selected.views]
    print_rows(console, table, [failure.message if failure else "" for failure in failures])
    if any(is_ranking(span) for view in selected.views for span in view.spans):
        console.print(
            "reward: the agent's own; with the scores of the judge, which training adds, the mean "
            f"of the step is {step.metrics['reward']:.2f}",
            highlight=False,
        )
    lines = (
        *format_checkpoints(folder, selected.steps),
        f"whole attempts: whet show {folder.path.name} --worst, --failed, or --rollout ID",
    )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
