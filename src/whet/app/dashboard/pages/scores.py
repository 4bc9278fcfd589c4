"""Evaluations task by task, and the health of rewards over training."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev

from whet.app.dashboard.pages.payload import describe_task
from whet.app.dashboard.run_catalog import OpenedRun
from whet.app.evaluation.statistics import AGENT_FAILURES, correlate
from whet.app.inspection.run_list import EVALUATION_KIND
from whet.store.queries import browse
from whet.types import JUDGE

TRIAL = re.compile(r"(?P<when>.+)-(?P<way>greedy|sampled)-(?P<task>\d{5,})(?:-\d+)?")
"""Id of an evaluation's rollout, as `app/evaluation/trials.py` writes it."""
MAX_TRIALS = 20_000
MAX_OUTCOMES = 4000
STEPS = 200
"""Latest steps whose rewards are checked for problems."""
EXCERPT = 200
DOMINANT = 0.98
"""Correlation with the whole reward from which a component dominates it."""
DISAGREEMENT = 0.2
"""Mean disagreement of a judge's votes above which a finding is reported."""
LENGTH_LIMIT = 0.7
"""Correlation of reward and length above which a finding is reported."""


async def read_evaluations(run: OpenedRun) -> dict[str, object]:
    """Return the evaluations of a run: each task with its rewards in every evaluation.

    A run of `whet eval` compares models, each of which is a run of the same database.
    """
    sides: dict[str, list[browse.EvaluatedRow]] = {}
    is_comparison = run.folder is not None and run.folder.read_kind() == EVALUATION_KIND
    names = await run.store.browse(browse.read_run_names) if is_comparison else [run.store.run]
    for name in names:
        store = run.store.for_run(name)
        for row in await store.browse(browse.read_evaluated, MAX_TRIALS):
            found = TRIAL.fullmatch(row.id)
            side = name if is_comparison else found["when"] if found else ""
            if found:
                # As in the run's report, a failure of the agent counts as a reward of 0.
                failed = row.failure in AGENT_FAILURES
                counted = row._replace(reward=0.0) if failed else row
                sides.setdefault(side, []).append(counted)
    return {
        "sides": [_format_side(name, rows) for name, rows in sides.items()],
        "tasks": _format_tasks(sides, has_pages=not is_comparison),
    }


def _format_side(name: str, rows: Sequence[browse.EvaluatedRow]) -> dict[str, object]:
    means: dict[str, float | None] = {}
    for way in ("greedy", "sampled"):
        found = [r.reward for r in rows if f"-{way}-" in r.id and r.reward is not None]
        means[way] = fmean(found) if found else None
    failed = sum(row.status == "failed" for row in rows)
    return {"name": name, "rollouts": len(rows), "failed": failed, **means}


def _format_tasks(
    sides: dict[str, list[browse.EvaluatedRow]], *, has_pages: bool
) -> list[dict[str, object]]:
    """Return each task with its rollouts, named if they have pages: those of this run."""
    tasks: dict[int, dict[str, object]] = {}
    tries: defaultdict[int, dict[str, dict[str, list[object]]]] = defaultdict(dict)
    for name, rows in sides.items():
        for row in rows:
            found = TRIAL.fullmatch(row.id)
            assert found is not None
            number = int(found["task"])
            tasks.setdefault(number, {"task": number, "text": describe_task(row.task, EXCERPT)})
            ways = tries[number].setdefault(name, {"greedy": [], "sampled": []})
            id = row.id if has_pages else None
            ways[found["way"]].append({"rollout": id, "reward": row.reward, "status": row.status})
    return [task | {"sides": tries[number]} for number, task in sorted(tasks.items())]


async def read_reward_health(run: OpenedRun) -> dict[str, object]:
    """Return spread, components and lengths of the rewards of the last steps, with findings."""
    steps = await run.store.browse(browse.read_step_rows, -1)
    first = max(0, (steps[-1].step if steps else 0) - STEPS + 1)
    components = [
        row
        for row in await run.store.browse(browse.read_rewards, first)
        if not row.key.startswith(f"{JUDGE}.")  # verdicts and costs, not parts of the reward
    ]
    judge = _read_judge([step for step in steps if step.step >= first])
    correlations = _correlate_components(components, steps)
    outcomes = await run.store.browse(browse.read_outcomes, first, MAX_OUTCOMES)
    rewards = [row.reward for row in outcomes]
    lengths = [float(row.sampled_tokens) for row in outcomes]
    by_group: defaultdict[str, list[float]] = defaultdict(list)
    for row in outcomes:
        by_group[row.group].append(row.reward)
    silent = [group for group, found in by_group.items() if len(set(found)) == 1]
    by_length = correlate(rewards, lengths) if len(rewards) > 2 else None
    return {
        "rollouts": len(rewards),
        "mean": fmean(rewards) if rewards else None,
        "std": pstdev(rewards) if rewards else None,
        "histogram": _count_bins(rewards),
        "groups": len(by_group),
        "silent_groups": len(silent),
        "length_correlation": by_length,
        "points": [(row.sampled_tokens, row.reward) for row in outcomes[:1000]],
        "components": _format_components(components, correlations),
        "judge": judge,
        "findings": [
            *_list_reward_findings(rewards, by_length, len(silent), len(by_group)),
            *_list_component_findings(correlations),
            *_list_judge_findings(judge),
        ],
    }


def _read_judge(steps: Sequence[browse.StepRow]) -> dict[str, list[float | None]] | None:
    """Return the judges' mean scores and disagreement by step; None without a judge."""
    judged = [step for step in steps if f"{JUDGE}/disagreement" in step.metrics]
    names = ("score", "disagreement", "failed")
    columns = {name: [step.metrics.get(f"{JUDGE}/{name}") for step in judged] for name in names}
    return {"step": [step.step + 1 for step in judged], **columns} if judged else None


def _list_judge_findings(judge: dict[str, list[float | None]] | None) -> list[str]:
    last = [value for value in (judge or {}).get("disagreement", []) if value is not None][-5:]
    if not last or fmean(last) <= DISAGREEMENT:
        return []
    return [f"the votes of the judge disagree ({fmean(last):.2f}): its scores are partly noise"]


def _count_bins(values: Sequence[float], bins: int = 12) -> dict[str, object]:
    if not values:
        return {"edges": [], "counts": []}
    low, high = min(values), max(values)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / width))] += 1
    return {"edges": [low + width * n for n in range(bins + 1)], "counts": counts}


def _group_by_key(rows: Sequence[browse.RewardRow]) -> dict[str, list[browse.RewardRow]]:
    by_key: defaultdict[str, list[browse.RewardRow]] = defaultdict(list)
    for row in rows:
        by_key[row.key].append(row)
    return by_key


def _correlate_components(
    rows: Sequence[browse.RewardRow], steps: Sequence[browse.StepRow]
) -> dict[str, float | None]:
    """Return the correlation of each reward key with the whole reward, over the steps."""
    totals = {step.step: step.metrics.get("reward") for step in steps}
    correlations: dict[str, float | None] = {}
    for key, found in _group_by_key(rows).items():
        pairs = [(row.mean, total) for row in found if (total := totals.get(row.step)) is not None]
        means, wholes = [mean for mean, _ in pairs], [total for _, total in pairs]
        correlations[key] = correlate(means, wholes)
    return correlations


def _format_components(
    rows: Sequence[browse.RewardRow], correlations: dict[str, float | None]
) -> list[dict[str, object]]:
    """Return each reward key by step, with its correlation to the whole reward."""
    return [
        {
            "key": key,
            "step": [row.step + 1 for row in found],
            "mean": [row.mean for row in found],
            "std": [math.sqrt(max(0.0, row.mean_square - row.mean**2)) for row in found],
            "min": min(row.min for row in found),
            "max": max(row.max for row in found),
            "count": sum(row.rewards for row in found),
            "correlation": correlations[key],
        }
        for key, found in _group_by_key(rows).items()
    ]


def _list_reward_findings(
    rewards: Sequence[float], by_length: float | None, silent_groups: int, groups: int
) -> list[str]:
    """Describe problems of the rewards; `by_length` is their correlation with the length."""
    found: list[str] = []
    if rewards and pstdev(rewards) < 1e-9:
        found.append("all rewards are equal: nothing can be learned from them")
    elif groups and silent_groups / groups > 0.8:
        share = silent_groups / groups
        found.append(f"{share:.0%} of the groups have equal rewards and teach nothing")
    if by_length is not None and abs(by_length) > LENGTH_LIMIT:
        rewarded = "longer" if by_length > 0 else "shorter"
        found.append(f"{rewarded} answers get more reward (correlation {by_length:+.2f})")
    return found


def _list_component_findings(correlations: dict[str, float | None]) -> list[str]:
    """Describe problems of the reward's components."""
    known = {key: value for key, value in correlations.items() if value is not None}
    dominant = [key for key, value in known.items() if abs(value) > DOMINANT]
    found: list[str] = []
    if len(known) > 1 and len(dominant) == 1:
        found.append(f"the reward follows one component alone: {dominant[0]}")
    return found + [
        f"{key} falls while the reward rises" for key, value in known.items() if value < -0.5
    ]
