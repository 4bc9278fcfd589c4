"""The seams between the parts. Each has the methods its callers use, and no others."""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from pydantic import JsonValue

from whet.config import AdamConfig, LossConfig
from whet.types import (
    Attempt,
    AttemptId,
    AttemptRecord,
    Call,
    Credit,
    Group,
    Metrics,
    Mode,
    Outcome,
    Piece,
    Resource,
    Reward,
    Rollout,
    RolloutRecord,
    Row,
    RunSize,
    Sampling,
    Span,
    Status,
    StepRecord,
    Trajectory,
    WorkerRecord,
)


class RolloutQueue(Protocol):
    """Work to do. Leases, not watchdogs: a dead worker's rollout becomes claimable by itself."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts. One whose id is already known is left as it is.

        Raises:
            NotFound: one asks for a resource that was never published; none is added.
        """
        ...

    async def claim(self, worker: str, *, lease_s: float, wait_s: float) -> Attempt | None:
        """Take a claimable rollout as a new attempt; wait for one up to `wait_s`.

        The highest priority goes first, and the oldest among equals.
        """
        ...

    async def heartbeat(self, attempt: AttemptId, *, lease_s: float) -> None:
        """Keep the lease. Raises LeaseLost once the attempt has ended or was given away.

        An attempt that outlives its rollout's `timeout_s` by more than a lease is ended here.
        """
        ...

    async def finish(self, attempt: AttemptId, outcome: Outcome) -> None:
        """End the attempt; its rollout ends too, or is queued again where another may mend it.

        Raises:
            LeaseLost: it had ended before, in another way; the outcome is kept but not taken.
        """
        ...

    async def wait(self, rollouts: Sequence[str]) -> None:
        """Return once every one of them is terminal."""
        ...

    async def cancel(self, rollouts: Sequence[str]) -> int:
        """End those that have not ended, with their attempts, and say how many there were.

        Raises:
            NotFound: one was never enqueued; none is cancelled.
        """
        ...


class AttemptWatch(Protocol):
    """How a runner hears that it works for nothing."""

    async def ended(self, attempt: AttemptId) -> Status:
        """Return once the attempt has ended, by its own worker or not. Raises NotFound."""
        ...


class AttemptLog(Protocol):
    """What happened in attempts: durable once a method returns."""

    async def attempt(self, attempt: AttemptId) -> Attempt:
        """A running attempt. Raises NotFound, or LeaseLost if it has ended."""
        ...

    async def append(self, call: Call) -> None:
        """Record a call, once by its id. Raises LeaseLost if the attempt ended without it."""
        ...

    async def emit(self, attempt: AttemptId, reward: Reward) -> None:
        """Record a reward. Raises LeaseLost if the attempt has ended."""
        ...

    async def rewards(self, attempt: AttemptId) -> list[Reward]:
        """The rewards of an attempt in the order they came. Raises NotFound."""
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


class SpanLog(Protocol):
    """What agents and their frameworks told of attempts, beside the calls."""

    async def record(self, attempt: AttemptId, spans: Sequence[Span]) -> None:
        """Add spans to an attempt, each once by its ids, also after it has ended.

        Raises:
            NotFound: there is no such attempt.
        """
        ...

    async def spans(self, attempt: AttemptId) -> list[Span]:
        """The spans of an attempt in the order they began. Raises NotFound."""
        ...


class StepLog(Protocol):
    """The training steps that are done. What is not here did not happen."""

    async def commit(self, record: StepRecord) -> None:
        """Record a step and the rollouts it consumed, in one transaction.

        The very record that was committed last is accepted again.

        Raises:
            StoreError: the step is not the next one, or a rollout was consumed before.
        """
        ...

    async def steps(self, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        """Those after a step, oldest first."""
        ...


class Resources(Protocol):
    """Versioned named values given to agents. A version never changes."""

    async def publish(self, name: str, value: JsonValue) -> int:
        """Add the next version of a name, and say which it is."""
        ...

    async def get(self, name: str, version: int) -> Resource:
        """One version. Raises NotFound."""
        ...

    async def latest(self, name: str) -> Resource:
        """The newest version. Raises NotFound."""
        ...

    async def resources(self) -> list[Resource]:
        """The newest version of every name, by name."""
        ...


class Directory(Protocol):
    """What is in a run, page by page."""

    async def rollouts(
        self,
        *,
        status: Status | None = None,
        mode: Mode | None = None,
        group: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> list[RolloutRecord]:
        """Rollouts in the order they came, those after the one of an id. Raises NotFound."""
        ...

    async def attempts(self, rollout: str) -> list[AttemptRecord]:
        """The attempts of a rollout, oldest first. Raises NotFound."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """Whoever claimed or waits to claim, the last heard of first."""
        ...

    async def counts(self) -> dict[str, int]:
        """How many rollouts, attempts, calls, spans, generations and sampled tokens there are."""
        ...


class Retention(Protocol):
    """What is kept, and for how long."""

    async def size(self) -> dict[str, RunSize]:
        """What every run of the store keeps, by run."""
        ...

    async def prune(self, before: float) -> int:
        """Forget calls, rewards and spans of rollouts that ended before a time; say of how many.

        The rollouts stay, with how they ended: none runs or trains again. A training rollout
        that succeeded and that no step has consumed keeps everything.
        """
        ...

    async def drop(self) -> None:
        """Forget the run and all that is in it."""
        ...

    async def vacuum(self) -> None:
        """Give the space of what was forgotten back to the disk."""
        ...

    async def export(self, file: Path) -> None:
        """Write the run to a file, whole or not at all."""
        ...

    async def load(self, file: Path) -> None:
        """Fill this run with what `export` wrote, exactly, whatever store that was.

        Raises:
            StoreError: the run is not empty, or the file is no export; nothing is added.
        """
        ...


class Store(
    RolloutQueue,
    AttemptWatch,
    AttemptLog,
    SpanLog,
    StepLog,
    Resources,
    Directory,
    Retention,
    Protocol,
):
    """Everything of one run, wherever it is kept. For whoever opens it; others ask for less."""

    run: str

    def for_run(self, run: str) -> "Store":
        """Another run of the same store, for as long as this one is open.

        Raises:
            StoreError: the run's name is none.
        """
        ...

    async def release_workers(self) -> int:
        """Take every running attempt from its worker, and say how many there were.

        For whoever starts a run again and knows that none of its workers is alive, so that none
        has to be waited for. The rollouts are queued again, and what was lost does not count
        towards their `max_attempts`: a restart loses no rollout.
        """
        ...

    async def close(self) -> None:
        """End what was begun and let go; whoever still waits gets StoreClosed. Idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        ...


class Engine(Protocol):
    """Samples tokens from the current policy. Knows tokens, not text."""

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[Piece]:
        """Sample one continuation: as it grows if `stream`, else in one piece at the end.

        What was sampled since one piece of a stream was taken is the next: who is slow to take
        them gets few and long ones.

        Closing the generator stops the sampling. Prompts of one `affinity` are likely to begin
        alike, so an engine of several replicas gives them to one of them; it changes no sample.

        Raises:
            PromptTooLong: the prompt leaves no room to sample.
            RequestError: it cannot sample in this way, such as by a grammar.
            EngineError: anything else; another attempt may succeed.
        """
        ...

    async def close(self) -> None:
        """Stop sampling and release the device. Idempotent."""
        ...


class Scorer(Protocol):
    """Says how likely given tokens are, to a model that need not have sampled them."""

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Of every token after a sequence's first, given those before it, at temperature 1.

        Raises:
            EngineError: the model cannot score them.
        """
        ...


class Algorithm(Protocol):
    """Gives credit. Arithmetic on rewards: no tensors, and nothing remembered between steps."""

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        """What the generations of a step's groups are worth; a group without credit is silent.

        `past` are the steps before, oldest first: whatever an algorithm would remember it reads
        there, so that a resumed run gives the credit an undisturbed one would have given. It may
        be asked again with more groups of the same step.
        """
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

    async def begin(self, rollouts: Sequence[Rollout]) -> None:
        """Have the rollouts run, unless they are known already, and wait for none."""
        ...

    async def wait(self, rollouts: Sequence[str]) -> None:
        """Return once every one of them, all begun before, has ended."""
        ...


class Tracker(Protocol):
    """Keeps the numbers of a run where people look at them. May block, and may raise anything."""

    last_step: int
    """The last step it has, of this process or an earlier one; 0 if none, 1 is the first."""

    def step(self, step: int, metrics: Metrics) -> None:
        """Keep what a step came to."""
        ...

    def finish(self, result: Metrics) -> None:
        """Keep what the run came to."""
        ...

    def close(self) -> None:
        """Send what is held back and let go."""
        ...
