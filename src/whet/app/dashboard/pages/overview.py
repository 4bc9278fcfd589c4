"""Pages about whole runs: the list, curves, queue and workers, resources, checkpoints."""

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from anyio import to_thread

from whet.app.dashboard.pages.alarms import find_alarms
from whet.app.dashboard.pages.payload import hide_secrets
from whet.app.dashboard.run_catalog import Catalog, OpenedRun
from whet.app.inspection.run_list import EVALUATION_KIND, RunSummary, summarize_folder
from whet.app.run_folder import RunFolder, read_object
from whet.errors import NotFound, StoreError
from whet.io.files import stat_files
from whet.store.queries import browse
from whet.training.learners import read_versions
from whet.types import find_gateways

MAX_CURVE_POINTS = 60
"""Points of the small curve in the list of runs."""
MAX_FAILURES = 2000
MAX_RUNNING = 200
MAX_VERSIONS = 50
VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""Parts of a message that differ between failures of one reason: quotations and numbers."""


async def list_run_cards(catalog: Catalog) -> dict[str, object]:
    """Return all runs with their reward curves."""
    cards: list[dict[str, object]] = []
    for run in await catalog.list_summaries():
        if not run.rewards and run.kind != EVALUATION_KIND:
            run = await _read_progress(catalog, run)
        card = dataclasses.asdict(run)
        card["rewards"] = list(run.rewards[-MAX_CURVE_POINTS:])
        cards.append(card)
    return {"runs": cards, "now": time.time()}


async def _read_progress(catalog: Catalog, run: RunSummary) -> RunSummary:
    """Add the steps of a run that has not written its report yet."""
    try:
        opened = await catalog.open(run.name)
        steps = await opened.store.browse(browse.read_step_rows, -1)
    except StoreError:  # no records on this machine
        return run
    rewards = tuple(step.metrics.get("reward") for step in steps)
    last = rewards[-1] if rewards else None
    return dataclasses.replace(run, steps=len(steps), rewards=rewards, reward=last)


async def read_run(run: OpenedRun) -> dict[str, object]:
    """Return a run: state, config, result, counts and alarms."""
    steps = await run.store.browse(browse.read_step_rows, -1)
    summary = await to_thread.run_sync(summarize_folder, run.folder) if run.folder else None
    folder = run.folder
    return {
        "name": run.name,
        "kind": summary.kind if summary else "",
        "state": summary.state if summary else "",
        "model": summary.model if summary else "",
        "gain": summary.gain if summary else None,
        "changed": summary.changed if summary else None,
        "config": hide_secrets(read_object(folder.config_file)) if folder else None,
        "report": (folder.read_report() or None) if folder else None,
        "statuses": await run.store.browse(browse.read_statuses),
        "steps": len(steps),
        "alarms": [alarm._asdict() for alarm in find_alarms(steps)],
        "now": time.time(),
    }


async def read_steps(run: OpenedRun, after: int) -> dict[str, object]:
    """Return the steps after step `after` as columns; a metric that a step lacks is null."""
    steps = await run.store.browse(browse.read_step_rows, after)
    names = sorted({name for step in steps for name in step.metrics})
    return {
        "step": [step.step + 1 for step in steps],
        "version": [step.version for step in steps],
        "checkpoint": [step.checkpoint for step in steps],
        "rollouts": [step.rollouts for step in steps],
        "metrics": {name: [step.metrics.get(name) for step in steps] for name in names},
    }


async def read_queue(run: OpenedRun) -> dict[str, object]:
    """Return counts by status, workers, running attempts, and the failures by reason."""
    failed = await run.store.browse(browse.read_failed, MAX_FAILURES)
    retried = await run.store.browse(browse.read_retried, MAX_FAILURES)
    running = await run.store.browse(browse.read_running, MAX_RUNNING)
    names = ("attempt", "worker", "started", "rollout", "lease_until")
    return {
        "statuses": await run.store.browse(browse.read_statuses),
        "workers": [worker.model_dump(mode="json") for worker in await run.store.workers()],
        "gateways": [each._asdict() for each in find_gateways(await run.store.resources())],
        "running": [dict(zip(names, row, strict=True)) for row in running],
        "failures": _group_failures(failed),
        "retried": _count_retried(retried),
        "now": time.time(),
    }


def _group_failures(failed: list[browse.FailedRollout]) -> list[dict[str, object]]:
    """Group failures by kind and message; quotations and numbers in the message are ignored."""
    groups: dict[tuple[str, str], dict[str, object]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for each in failed:  # the newest first
        kind, message = str(each.failure.get("kind", "")), str(each.failure.get("message", ""))
        key = (kind, VARYING.sub("#", message)[:300])
        counts[key] += 1
        group = groups.setdefault(
            key, {"kind": kind, "message": message, "last": each.id, "last_step": each.step}
        )
        group["first"], group["first_step"] = each.id, each.step
    return [groups[key] | {"count": count} for key, count in counts.most_common()]


def _count_retried(retried: Sequence[tuple[Mapping[str, object], int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for failure, count in retried:
        counts[str(failure.get("kind", ""))] += count
    return dict(counts)


async def read_resources(run: OpenedRun) -> dict[str, object]:
    """Return every resource with its newest version."""
    rows = await run.store.browse(browse.read_resource_names)
    names = ("name", "version", "created")
    return {"resources": [dict(zip(names, row, strict=True)) for row in rows]}


async def read_resource(run: OpenedRun, name: str) -> dict[str, object]:
    """Return the versions of a resource, the newest first. Raises NotFound."""
    versions = await run.store.browse(browse.read_versions, name, MAX_VERSIONS)
    if not versions:
        raise NotFound(f"there is no resource {name!r}")
    return {
        "name": name,
        "versions": [
            {"version": version, "value": hide_secrets(value, name), "created": created}
            for version, value, created in versions
        ],
    }


async def read_checkpoints(run: OpenedRun) -> dict[str, object]:
    """Return the checkpoints of steps, with those that are on this disk."""
    steps = await run.store.browse(browse.read_step_rows, -1)
    present = await to_thread.run_sync(_measure_checkpoints, run.folder) if run.folder else {}
    return {
        "checkpoints": [
            {
                "step": step.step + 1,
                "version": step.version,
                "policies": read_versions(step.metrics),
                "name": step.checkpoint,
                "bytes": present.get(step.checkpoint),
                "reward": step.metrics.get("reward"),
                "evaluation": {k: v for k, v in step.metrics.items() if k.startswith("eval/")},
            }
            for step in steps
        ],
        "model": str(run.folder.model) if run.folder and run.folder.model.exists() else None,
    }


def _measure_checkpoints(folder: RunFolder) -> dict[str, int]:
    found = folder.checkpoints.iterdir() if folder.checkpoints.is_dir() else ()
    return {
        path.name: sum(file.st_size for file in stat_files(path)) for path in found if path.is_dir()
    }
