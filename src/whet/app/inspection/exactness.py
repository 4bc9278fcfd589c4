"""Exactness report of a run: tokens reused, forks by cause, rows that training would use."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from anyio import to_thread
from pydantic import JsonValue

from whet.config import SelectionConfig
from whet.io.genai_spans import UntrainableCall, find_untrainable_calls
from whet.io.paging import iterate_pages
from whet.io.text import format_count
from whet.protocols import Store
from whet.training.diagnosis import explain_metrics
from whet.training.rows import build_rows
from whet.training.selection import explain_exclusions
from whet.types import Credit, Mode, StepRecord, Trajectory

MAX_REASONS = 8
"""Reasons of failed rollouts that are listed, the most frequent first."""


@dataclass(slots=True)
class ExactnessCounts:
    """Counts over the succeeded training rollouts of a store."""

    rollouts: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    """Tokens of all prompts as served."""
    stored_tokens: int = 0
    """Tokens in the store, each once: contexts and samples."""
    sampled_tokens: int = 0
    rows: int = 0
    row_tokens: int = 0
    unproven: int = 0
    constrained: int = 0
    lossy: int = 0
    omitted: Counter[str] = field(default_factory=Counter[str])
    """Calls with parts that the chat template leaves out, by part."""
    forks: Counter[str] = field(default_factory=Counter[str])
    unselected: Counter[str] = field(default_factory=Counter[str])
    """Generations that the selection excludes from training, by reason."""
    without_tokens: dict[str, list[UntrainableCall]] = field(
        default_factory=dict[str, list[UntrainableCall]]
    )
    """Calls that bypassed the gateway and are known by spans without token ids; by server."""

    def add(self, trajectory: Trajectory, selection: SelectionConfig) -> None:
        """Count one trajectory as if every generation had credit."""
        self.rollouts += 1
        ids = trajectory.generation_ids()
        reasons = explain_exclusions(trajectory.calls, selection)
        self.unselected.update(reasons.values())
        built = build_rows([Credit(trajectory, {id: 1.0 for id in ids if id not in reasons})])
        self.rows += len(built.rows)
        self.row_tokens += sum(len(row.tokens) for row in built.rows)
        self.unproven += len(built.unproven)
        self.constrained += len(built.constrained)
        for call in trajectory.calls:
            if not call.generations:
                continue  # the record of a deletion
            sampled = sum(len(g.tokens) for g in call.generations)
            self.calls += 1
            self.prompt_tokens += call.prompt_length
            self.stored_tokens += len(call.prompt_suffix) + sampled
            self.sampled_tokens += sampled
            self.lossy += call.origin.lossy
            self.omitted.update(omission.value for omission in call.origin.omitted)
            if call.origin.fork:
                self.forks[call.origin.fork.value] += 1

    def as_json(self, steps: list[StepRecord]) -> dict[str, JsonValue]:
        """The report, as `whet doctor --run` shows it."""
        gaps = [s.metrics["logprob_gap"] for s in steps if "logprob_gap" in s.metrics]
        return {
            "rollouts": self.rollouts,
            "calls": self.calls,
            "rows": self.rows,
            "calls_per_row": self.calls / self.rows if self.rows else None,
            "sampled_tokens": self.sampled_tokens,
            "prompt_tokens_served": self.prompt_tokens,
            "tokens_stored": self.stored_tokens,
            "row_tokens": self.row_tokens,
            "unproven": self.unproven,
            "constrained": self.constrained,
            "lossy_echoes": self.lossy,
            "omitted_by_template": dict(self.omitted),
            "forks": dict(self.forks),
            "unselected": dict(self.unselected),
            "without_token_ids": {
                calls[0].reason: len(calls) for calls in self.without_tokens.values()
            },
            "logprob_gap": statistics.fmean(gaps) if gaps else None,
        }


async def build_exactness_report(store: Store, selection: SelectionConfig) -> dict[str, JsonValue]:
    """Read all records of a run and count; `selection` decides what would be trained."""
    counts, failures = ExactnessCounts(), Counter[str]()
    async for page in iterate_pages(store, mode=Mode.TRAIN):
        ids = [record.rollout.id for record in page]
        await count_exactness(counts, store, ids, selection)
        failures.update((await store.failures(ids)).values())
    steps = await store.steps()
    return {
        "verdict": _explain_training(steps, counts.rollouts, failures.total()),
        "failed_rollouts": failures.total(),
        "failures": dict(failures.most_common(MAX_REASONS)),
        **counts.as_json(steps),
    }


def _explain_training(steps: Sequence[StepRecord], succeeded: int, failed: int) -> str:
    """Whether a run has trained anything, in a sentence."""
    if any(step.metrics.get("rows", 1) for step in steps):  # a driver's own steps may lack it
        tokens = sum(step.metrics.get("trained_tokens", 0.0) for step in steps)
        return f"trained {tokens:,.0f} tokens in {format_count(len(steps), 'step')}"
    if failed and not succeeded:
        return f"nothing was trained: {format_count(failed, 'rollout')} failed, and none succeeded"
    if not steps:
        return "nothing was trained: no step has finished"
    return f"nothing was trained: {explain_metrics([step.metrics for step in steps])}"


async def count_exactness(
    counts: ExactnessCounts, store: Store, rollouts: Sequence[str], selection: SelectionConfig
) -> None:
    """Add the records of some rollouts to the counts."""
    for trajectory in await store.trajectories(rollouts):
        await to_thread.run_sync(counts.add, trajectory, selection)
        if not trajectory.calls:
            id = trajectory.attempt.id
            for call in find_untrainable_calls(id, await store.spans(id)):
                counts.without_tokens.setdefault(call.server, []).append(call)
