"""On-policy distillation: match a teacher on the student's own samples."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from whet.config import AlgorithmConfig
from whet.errors import ConfigError
from whet.protocols import Algorithm, Scorer
from whet.training.rows import build_rows
from whet.types import Credit, GenerationId, Group, SampledSegment, StepRecord


@dataclass(frozen=True, slots=True)
class Distillation(Algorithm):
    """Advantage of a token is its log-probability under the teacher minus that under the sampler.

    In expectation that is minus the reverse KL divergence at each token the student sampled
    (thinkingmachines.ai/blog/on-policy-distillation). Rewards are logged and not read.
    """

    config: AlgorithmConfig
    teacher: Scorer

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        trajectories = {t.attempt.id: t for group in groups for t in group}
        everything = [Credit.even(trajectory, 0.0) for trajectory in trajectories.values()]
        advantages = defaultdict[str, dict[GenerationId, tuple[float, ...]]](dict)
        rows = build_rows(everything).rows
        scored = await self.teacher.logprobs([row.tokens for row in rows])
        for row, teacher in zip(rows, scored, strict=True):
            for segment in row.segments:
                _check_plain_sampling(segment, row.rollout)
                pairs = zip(
                    teacher[segment.start - 1 : segment.end - 1], segment.logprobs, strict=True
                )
                advantages[row.rollout][segment.generation] = tuple(t - s for t, s in pairs)
        return [
            Credit(trajectory, advantages[trajectory.attempt.rollout.id])
            for trajectory in trajectories.values()
            if trajectory.attempt.rollout.id in advantages
        ]


def _check_plain_sampling(segment: SampledSegment, rollout: str) -> None:
    """Reject segments sampled from a modified distribution: their log-probs are not comparable."""
    if segment.temperature not in (0.0, 1.0) or segment.top_p < 1 or segment.top_k > 0:
        raise ConfigError(
            f"rollout {rollout!r} was sampled with temperature {segment.temperature:g}, top_p "
            f"{segment.top_p:g} and top_k {segment.top_k}; distillation needs temperature 1 "
            "(or 0) and nothing cut off: set runner.temperature to 1"
        )
