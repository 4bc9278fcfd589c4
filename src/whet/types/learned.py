"""What is learned: trajectories, their credit, and the rows a trainer sees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import FiniteFloat

from whet.types.sampled import Call
from whet.types.work import Attempt, GenerationId, Reward, Value


class Trajectory(Value):
    """A succeeded attempt read back for learning: its calls in order, and its reward."""

    attempt: Attempt
    calls: tuple[Call, ...]
    rewards: tuple[Reward, ...]
    reward: FiniteFloat

    def generation_ids(self) -> list[GenerationId]:
        return [c.generation_id(i) for c in self.calls for i in range(len(c.generations))]


Group = Sequence[Trajectory]
"""The trajectories of one group: the same task, tried several times."""


@dataclass(frozen=True, slots=True)
class Credit:
    """A trajectory and what each of its generations is worth."""

    trajectory: Trajectory
    advantages: Mapping[GenerationId, float | tuple[float, ...]]
    """Of a whole generation, or of each of its tokens. One that is absent is context and is not
    trained."""

    @classmethod
    def even(cls, trajectory: Trajectory, advantage: float) -> "Credit":
        """The same for every generation of a trajectory."""
        return cls(trajectory, dict.fromkeys(trajectory.generation_ids(), advantage))


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """The part of a row that one generation sampled."""

    generation: GenerationId
    start: int
    """Index of the first sampled token in the row."""
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantages: tuple[float, ...]
    """Per token."""
    weight: float
    """What one token of this span counts in the loss; the losses themselves are plain sums."""
    temperature: float
    top_p: float
    top_k: int

    @property
    def end(self) -> int:
        return self.start + len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Row:
    """One token sequence, proven to be what the engine saw and sampled. All a trainer sees."""

    tokens: tuple[int, ...]
    spans: tuple[SampledSpan, ...]
    """In order, without overlap. Tokens outside them are context."""
    rollout: str
    group: str

    @property
    def trained_tokens(self) -> int:
        return sum(len(span.logprobs) for span in self.spans)


Metrics = Mapping[str, float]


class StepRecord(Value):
    """A training step that is done: written in one transaction with what it consumed."""

    step: int
    """0 for the first."""
    version: int
    """Of the policy after the step."""
    checkpoint: str
    """Folder name under the run's `checkpoints/`."""
    consumed: tuple[str, ...]
    """The rollouts this step learned from, or found nothing to learn in."""
    metrics: dict[str, float]
