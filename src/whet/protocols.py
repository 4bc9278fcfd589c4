"""The seams between the parts. Each has the methods its callers use, and no others."""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

from whet.config import AdamConfig, LossConfig
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    Credit,
    Group,
    Metrics,
    Outcome,
    Piece,
    Reward,
    Rollout,
    Row,
    Sampling,
    StepRecord,
    Trajectory,
)


class RolloutQueue(Protocol):
    """Work to do. Leases, not watchdogs: a dead worker's rollout becomes claimable by itself."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts. One whose id is already known is left as it is."""
        ...

    async def claim(self, worker: str, *, lease_s: float, wait_s: float) -> Attempt | None:
        """Take the oldest claimable rollout as a new attempt; wait for one up to `wait_s`."""
        ...

    async def heartbeat(self, attempt: AttemptId, *, lease_s: float) -> None:
        """Keep the lease. Raises LeaseLost once the attempt has ended or was given away."""
        ...

    async def finish(self, attempt: AttemptId, outcome: Outcome) -> None:
        """End the attempt; its rollout ends too, or is queued again where another may mend it.

        Raises:
            LeaseLost: the attempt had ended before; the outcome is not taken.
        """
        ...

    async def wait(self, rollouts: Sequence[str]) -> None:
        """Return once every one of them is terminal."""
        ...


class AttemptLog(Protocol):
    """What happened in attempts: durable once a method returns."""

    async def attempt(self, attempt: AttemptId) -> Attempt:
        """A running attempt. Raises NotFound, or LeaseLost if it has ended."""
        ...

    async def append(self, call: Call) -> None:
        """Record a call, once by its id. Raises LeaseLost if the attempt has ended."""
        ...

    async def emit(self, attempt: AttemptId, reward: Reward) -> None:
        """Record a reward. Raises LeaseLost if the attempt has ended."""
        ...

    async def calls(self, attempt: AttemptId) -> list[Call]:
        """The calls of an attempt in the order they were recorded."""
        ...

    async def trajectories(self, rollouts: Sequence[str]) -> list[Trajectory]:
        """The succeeded attempts of these rollouts, in the order asked; the failed are left out."""
        ...

    async def failures(self, rollouts: Sequence[str]) -> dict[str, str]:
        """Why rollouts failed: `kind: message` by id, for those of the given that did."""
        ...


class StepLog(Protocol):
    """The training steps that are done. What is not here did not happen."""

    async def commit(self, record: StepRecord) -> None:
        """Record a step and the rollouts it consumed, in one transaction.

        Raises:
            StoreError: the step is not the next one, or a rollout was consumed before.
        """
        ...

    async def steps(self) -> list[StepRecord]:
        """All of them, oldest first."""
        ...


class Engine(Protocol):
    """Samples tokens from the current policy. Knows tokens, not text."""

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False
    ) -> AsyncGenerator[Piece]:
        """Sample one continuation: as it grows if `stream`, else in one piece at the end.

        Closing the generator stops the sampling.

        Raises:
            PromptTooLong: the prompt leaves no room to sample.
            RequestError: it cannot sample in this way, such as by a grammar.
            EngineError: anything else; another attempt may succeed.
        """
        ...

    async def close(self) -> None:
        """Stop sampling and release the device. Idempotent."""
        ...


class Algorithm(Protocol):
    """Gives credit. Arithmetic on rewards: no tokens, no tensors."""

    def credit(self, group: Group) -> list[Credit]:
        """What each generation of the group is worth; empty if the group teaches nothing."""
        ...


class Trainer(Protocol):
    """Changes the weights. Blind to the algorithm: it sees rows."""

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        """Add the gradient of the loss, a sum over the rows' sampled tokens."""
        ...

    async def optim_step(self, adam: AdamConfig) -> Metrics:
        """Apply the gradient and clear it."""
        ...

    async def publish(self) -> int:
        """Have the engine serve the weights as they are now; returns their version."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights, optimizer and version. The folder appears whole or not at all."""
        ...

    async def restore(self, folder: Path) -> None:
        """Continue from what `save` wrote. Raises TrainerError if it does not fit the model."""
        ...

    async def export(self, folder: Path) -> None:
        """Write the weights as other tools load them: a PEFT adapter or a model folder."""
        ...


class Collector(Protocol):
    """Turns tasks into finished groups."""

    async def collect(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """Run the rollouts, or find them done; one group for each group name, in order."""
        ...
