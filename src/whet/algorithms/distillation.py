"""On-policy distillation: learn from a teacher what to say where the student has got itself."""

from collections import defaultdict
from collections.abc import Sequence

from whet.algorithms.returns import score
from whet.config import AlgorithmConfig
from whet.errors import ConfigError
from whet.protocols import Algorithm, Scorer
from whet.rows import build_rows
from whet.types import Credit, GenerationId, Group, SampledSpan, StepRecord


class Distillation(Algorithm):
    """Advantage of a token is its log-probability to the teacher less that to the sampler.

    In expectation that is minus the reverse KL divergence at each token the student sampled
    (thinkingmachines.ai/blog/on-policy-distillation). Rewards are logged and not read.
    """

    def __init__(self, config: AlgorithmConfig, teacher: Scorer) -> None:
        self._config = config
        self._teacher = teacher

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        trajectories = {t.attempt.id: t for group in groups for t in group}
        for trajectory in trajectories.values():
            score(trajectory, self._config)  # refuses rewards that nobody would read
        everything = [Credit.even(trajectory, 0.0) for trajectory in trajectories.values()]
        advantages = defaultdict[str, dict[GenerationId, tuple[float, ...]]](dict)
        rows = build_rows(everything).rows
        scored = await self._teacher.logprobs([row.tokens for row in rows])
        for row, teacher in zip(rows, scored, strict=True):
            for span in row.spans:
                _refuse_shaped(span, row.rollout)
                pairs = zip(teacher[span.start - 1 : span.end - 1], span.logprobs, strict=True)
                advantages[row.rollout][span.generation] = tuple(t - s for t, s in pairs)
        return [
            Credit(trajectory, advantages[trajectory.attempt.rollout.id])
            for trajectory in trajectories.values()
            if trajectory.attempt.rollout.id in advantages
        ]


def _refuse_shaped(span: SampledSpan, rollout: str) -> None:
    """A log-probability of a shaped distribution is not to be compared with a plain one."""
    if span.temperature not in (0.0, 1.0) or span.top_p < 1 or span.top_k > 0:
        raise ConfigError(
            f"rollout {rollout!r} was sampled with temperature {span.temperature:g}, top_p "
            f"{span.top_p:g} and top_k {span.top_k}; distillation needs temperature 1 (or 0) and "
            "nothing cut off: set runner.temperature to 1"
        )
