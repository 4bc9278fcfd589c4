"""What a run's records say of its exactness: how much was reused, where and why it forked."""

import statistics
from collections import Counter
from dataclasses import dataclass, field

from pydantic import JsonValue

from whet.config import SelectionConfig
from whet.protocols import Store
from whet.recorded import Untold, untold_calls
from whet.rows import build_rows
from whet.selection import count_reasons, why_not
from whet.types import Credit, Mode, StepRecord, Trajectory

PAGE = 256
"""Rollouts read at a time."""


@dataclass(slots=True)
class Drift:
    """Counted over the succeeded training rollouts of a store."""

    rollouts: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    """As served: what re-sending every prompt amounts to."""
    stored_tokens: int = 0
    """Each token once: contexts and samples."""
    sampled_tokens: int = 0
    rows: int = 0
    row_tokens: int = 0
    unproven: int = 0
    constrained: int = 0
    lossy: int = 0
    forks: Counter[str] = field(default_factory=Counter[str])
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Generations that selection would not train, by reason."""
    untold: dict[str, list[Untold]] = field(default_factory=dict[str, list[Untold]])
    """Calls that passed us by, told by spans without their tokens; by server."""

    def add(self, trajectory: Trajectory, selection: SelectionConfig) -> None:
        """Count one trajectory as if every generation had credit."""
        self.rollouts += 1
        ids = [c.generation_id(i) for c in trajectory.calls for i in range(len(c.generations))]
        reasons = why_not(trajectory.calls, selection)
        self.left_out.update(count_reasons(reasons))
        built = build_rows([Credit(trajectory, {id: 1.0 for id in ids if id not in reasons})])
        self.rows += len(built.rows)
        self.row_tokens += sum(len(row.tokens) for row in built.rows)
        self.unproven += len(built.unproven)
        self.constrained += len(built.constrained)
        for call in trajectory.calls:
            if not call.generations:
                continue  # a deletion: nothing was served
            sampled = sum(len(g.tokens) for g in call.generations)
            self.calls += 1
            self.prompt_tokens += call.prompt_length
            self.stored_tokens += len(call.context) + sampled
            self.sampled_tokens += sampled
            self.lossy += call.origin.lossy
            if call.origin.fork:
                self.forks[call.origin.fork.value] += 1

    def as_json(self, steps: list[StepRecord]) -> dict[str, JsonValue]:
        """The report."""
        gaps = [s.metrics["logprob_gap"] for s in steps if "logprob_gap" in s.metrics]
        return {
            "rollouts": self.rollouts,
            "calls": self.calls,
            "rows": self.rows,
            "merge_ratio": self.calls / self.rows if self.rows else None,
            "sampled_tokens": self.sampled_tokens,
            "prompt_tokens_served": self.prompt_tokens,
            "tokens_stored": self.stored_tokens,
            "row_tokens": self.row_tokens,
            "unproven": self.unproven,
            "constrained": self.constrained,
            "lossy_echoes": self.lossy,
            "forks": dict(self.forks),
            "left_out": dict(self.left_out),
            "without_token_ids": {calls[0].why: len(calls) for calls in self.untold.values()},
            "logprob_gap": statistics.fmean(gaps) if gaps else None,
        }


async def drift_report(store: Store, selection: SelectionConfig) -> dict[str, JsonValue]:
    """Read the records of a run through and report. `selection` says what would be trained."""
    drift = Drift()
    last: str | None = None
    while page := await store.rollouts(mode=Mode.TRAIN, after=last, limit=PAGE):
        ids = [record.rollout.id for record in page]
        for trajectory in await store.trajectories(ids):
            drift.add(trajectory, selection)
            if not trajectory.calls:
                id = trajectory.attempt.id
                for call in untold_calls(id, await store.spans(id)):
                    drift.untold.setdefault(call.server, []).append(call)
        last = ids[-1]
    return drift.as_json(await store.steps())
