"""Training data: trajectories, their credit, rows for the trainer, and step records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import FiniteFloat

from whet.types.calls import Call
from whet.types.rollouts import Attempt, Failure, GenerationId, Reward, Value

LENGTH_PENALTY = "length_penalty"
"""Key of the rewards that reduce a trajectory's reward by the length of its answers."""

JUDGE_MODEL = "judge"
"""Name by which agents reach the model that `gateway.judge` names."""


class Trajectory(Value):
    """An ended attempt read back for learning: its calls in order, and its reward."""

    attempt: Attempt
    calls: tuple[Call, ...]
    rewards: tuple[Reward, ...]
    reward: FiniteFloat
    """Of a failed attempt: 0 as read from the store, its `failure_reward` in training."""
    failure: Failure | None = None
    """Set if it failed."""

    def generation_ids(self) -> list[GenerationId]:
        return [id for call in self.calls for id in call.generations_by_id]


NO_ADVANTAGES: Mapping[GenerationId, float] = {}
"""Those of a step without credit, such as one of supervised training."""

Group = Sequence[Trajectory]
"""The trajectories of one group: several attempts at the same task."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantages of a trajectory's generations."""

    trajectory: Trajectory
    advantages: Mapping[GenerationId, float | tuple[float, ...]]
    """One number for a whole generation, or one per token. A generation without an entry is context
    and is not trained."""

    @classmethod
    def even(cls, trajectory: Trajectory, advantage: float) -> "Credit":
        """Give every generation of a trajectory the same advantage."""
        return cls(trajectory, dict.fromkeys(trajectory.generation_ids(), advantage))

    def mean_advantages(self) -> dict[GenerationId, float]:
        """One number for each generation with tokens: the mean over them where they differ."""
        return {
            id: fmean(value) if isinstance(value, tuple) else value
            for id, value in self.advantages.items()
            if value != ()
        }


@dataclass(frozen=True, slots=True)
class SampledSegment:
    """The tokens of a row that one generation sampled."""

    generation: GenerationId
    start: int
    """Index of the first sampled token in the row."""
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantages: tuple[float, ...]
    """Per token."""
    weight: float
    """Weight of each token in the loss, which is a plain sum over tokens."""
    temperature: float
    top_p: float
    top_k: int
    old_logprobs: tuple[float, ...] | None = None
    """Log-probabilities by the trainer before the first update of a step, where they were
    computed."""

    @property
    def end(self) -> int:
        return self.start + len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Row:
    """One token sequence, proven to be what the engine saw and sampled: a trainer's only input."""

    tokens: tuple[int, ...]
    segments: tuple[SampledSegment, ...]
    """In order, without overlap. Tokens outside them are context."""
    rollout: str
    group: str

    @property
    def trained_tokens(self) -> int:
        return sum(len(segment.logprobs) for segment in self.segments)


Metrics = Mapping[str, float]


class StepRecord(Value):
    """A completed training step, committed in one transaction with the rollouts it consumed."""

    step: int
    """0 for the first."""
    version: int
    """Policy version after the step."""
    checkpoint: str
    """Folder name under the run's `checkpoints/`."""
    consumed: tuple[str, ...]
    """Ids of the rollouts the step used, including those without a learning signal."""
    metrics: dict[str, float]
