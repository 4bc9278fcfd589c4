"""Protocols between the parts. Each has the methods its callers use, and no others."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from pydantic import JsonValue

from whet.config import AdamStep, LossConfig
from whet.types import (
    NO_ADVANTAGES,
    Attempt,
    AttemptId,
    AttemptRecord,
    Call,
    Credit,
    GenerationId,
    Group,
    Metrics,
    Mode,
    Outcome,
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
    TokenChunk,
    Trajectory,
    WorkerRecord,
)


class RolloutQueue(Protocol):
    """Queue of rollouts under leases: a dead worker's rollout becomes claimable by itself."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts. One whose id is already known is left unchanged.

        Raises:
            NotFound: one names a resource that was never published; none is added.
        """
        ...

    async def claim(self, worker: str, *, lease_s: float, wait_s: float) -> Attempt | None:
        """Claim a rollout as a new attempt; wait up to `wait_s` for one.

        Highest priority first, oldest first among equals.
        """
        ...

    async def heartbeat(self, attempt: AttemptId, *, lease_s: float) -> None:
        """Renew the lease. Raises LeaseLost once the attempt has ended or was reassigned.

        An attempt that exceeds its rollout's `timeout_s` by more than a lease is ended here.
        """
        ...

    async def finish(self, attempt: AttemptId, outcome: Outcome) -> None:
        """End the attempt; its rollout ends too, or is queued again if the failure is retried.

        Raises:
            LeaseLost: it had ended before with another outcome; this one is kept as late.
        """
        ...

    async def wait(self, rollouts: Sequence[str]) -> None:
        """Return once all of them have ended."""
        ...

    async def cancel(self, rollouts: Sequence[str]) -> int:
        """Cancel those that have not ended, with their attempts; return how many there were.

        Raises:
            NotFound: one was never enqueued; none is canceled.
        """
        ...


class AttemptWatch(Protocol):
    """Notification that an attempt has ended, which may happen outside of its runner."""

    async def ended(self, attempt: AttemptId) -> Status:
        """Return once the attempt has ended, by its worker or otherwise. Raises NotFound."""
        ...


class CallLog(Protocol):
    """Calls of attempts, and the results of rollouts: durable once a method returns."""

    async def attempt(self, attempt: AttemptId) -> Attempt:
        """Return a running attempt. Raises NotFound, or LeaseLost if it has ended."""
        ...

    async def append(self, call: Call) -> None:
        """Record a call, once per id. Raises LeaseLost if the attempt ended without it."""
        ...

    async def calls(self, attempt: AttemptId) -> list[Call]:
        """Return the calls of an attempt in the order they were recorded."""
        ...

    async def trajectories(
        self, rollouts: Sequence[str], *, failed: bool = False
    ) -> list[Trajectory]:
        """Return the succeeded attempts of these rollouts, in that order.

        With `failed` also the last attempts of failed rollouts, with a reward of 0.
        """
        ...

    async def failures(self, rollouts: Sequence[str]) -> dict[str, str]:
        """Return `kind: message` by rollout id, for those of the rollouts that failed."""
        ...


class RewardLog(Protocol):
    """Rewards of attempts, other than the final one: durable once `emit` returns."""

    async def emit(
        self, attempt: AttemptId, reward: Reward, *, idempotency_key: str | None = None
    ) -> None:
        """Record a reward, once per key of the attempt. Raises LeaseLost if it has ended."""
        ...

    async def rewards(self, attempt: AttemptId) -> list[Reward]:
        """Return the rewards of an attempt in the order they were emitted. Raises NotFound."""
        ...


class SpanLog(Protocol):
    """OpenTelemetry spans of attempts, as reported by agents and their frameworks."""

    async def record(self, attempt: AttemptId, spans: Sequence[Span]) -> None:
        """Add spans to an attempt, once per ids, also after it has ended. Raises NotFound."""
        ...

    async def spans(self, attempt: AttemptId) -> list[Span]:
        """Return the spans of an attempt in the order they started. Raises NotFound."""
        ...


class StepLog(Protocol):
    """Log of completed training steps. A step that is not in it did not happen."""

    async def commit(
        self,
        record: StepRecord,
        *,
        advantages: Mapping[GenerationId, float] = NO_ADVANTAGES,
        epoch: int | None = None,
    ) -> None:
        """Record a step, the rollouts it consumed and the advantages it gave, in one transaction.

        Committing the last record again is a no-op. `epoch` is that of `Resources.publish`.

        Raises:
            LeaseLost: another trainer has taken over the run.
            StoreError: the step is not the next one, or a rollout was consumed before.
        """
        ...

    async def steps(self, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        """Return the steps after a step, oldest first."""
        ...

    async def advantages(self, step: int) -> dict[GenerationId, float]:
        """Return the mean advantage of each generation that had credit in a step.

        Empty for a step that was recorded without, or never.
        """
        ...


class Resources(Protocol):
    """Versioned named values for agents. A version never changes."""

    async def publish(self, name: str, value: JsonValue, *, epoch: int | None = None) -> int:
        """Add the next version of a name and return its number.

        `epoch` is the version of the resource `trainer` that the writer has published itself.

        Raises:
            LeaseLost: there is a newer version of `trainer`: another trainer has taken over.
        """
        ...

    async def get(self, name: str, version: int) -> Resource:
        """Return one version. Raises NotFound."""
        ...

    async def latest(self, name: str) -> Resource:
        """Return the newest version. Raises NotFound."""
        ...

    async def resources(self) -> list[Resource]:
        """Return the newest version of every name, sorted by name."""
        ...


class Listings(Protocol):
    """The rollouts, attempts and workers of a run, page by page."""

    async def rollouts(
        self,
        *,
        status: Status | None = None,
        mode: Mode | None = None,
        group: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> list[RolloutRecord]:
        """List rollouts as enqueued, those `after` the one of an id. Raises NotFound."""
        ...

    async def attempts(self, rollout: str) -> list[AttemptRecord]:
        """List the attempts of a rollout, oldest first. Raises NotFound."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """List the workers that have claimed or wait to claim, most recently seen first."""
        ...

    async def counts(self) -> dict[str, int]:
        """Count rollouts, attempts, calls, spans, generations and sampled tokens."""
        ...


class Retention(Protocol):
    """Size, pruning, export and import of runs."""

    async def size(self) -> dict[str, RunSize]:
        """Return the size of every run of the store, by run."""
        ...

    async def prune(self, before: float) -> int:
        """Delete calls, rewards and spans of rollouts that ended before a time; return how many.

        The rollouts stay with their outcomes, so none runs or trains again. A training rollout that
        no step has consumed keeps everything, also if it failed.
        """
        ...

    async def drop(self) -> None:
        """Delete the run and all its records."""
        ...

    async def vacuum(self) -> None:
        """Return the space of deleted records to the disk."""
        ...

    async def export(self, file: Path) -> None:
        """Write the run to a file atomically."""
        ...

    async def load(self, file: Path) -> None:
        """Load what `export` of any store wrote into this empty run.

        Raises:
            StoreError: the run is not empty, or the file is not an export; nothing is added.
        """
        ...


class Store(
    RolloutQueue,
    AttemptWatch,
    CallLog,
    RewardLog,
    SpanLog,
    StepLog,
    Resources,
    Listings,
    Retention,
    Protocol,
):
    """All protocols of a store, for one run. Code that only uses a store asks for fewer of them."""

    run: str

    def for_run(self, run: str) -> "Store":
        """Return another run of the same store, valid while this one is open.

        Raises:
            StoreError: the run's name is invalid.
        """
        ...

    async def release_workers(self) -> int:
        """End the lease of every running attempt and return how many there were.

        For a process that restarts a run and knows that none of its workers is alive, so that no
        lease has to expire first. The rollouts are queued again, and the lost attempts do not
        count towards `max_attempts`: a restart loses no rollout.
        """
        ...

    async def close(self) -> None:
        """Finish pending writes and close; pending waits raise StoreClosed. Idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store."""
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
    ) -> AsyncGenerator[TokenChunk]:
        """Sample one continuation: chunk by chunk if `stream`, else as one chunk at the end.

        A chunk holds everything sampled since the previous one was consumed, so a slow consumer
        gets fewer and longer chunks.

        Closing the generator stops sampling. Prompts with the same `affinity` are likely to share
        a prefix, so an engine with several replicas routes them to one; samples do not change.

        Raises:
            PromptTooLong: the prompt leaves no room to sample.
            RequestError: the engine does not support the sampling parameters, such as a grammar.
            EngineError: anything else; another attempt may succeed.
        """
        ...

    async def close(self) -> None:
        """Stop sampling and release the device. Idempotent."""
        ...


class Scorer(Protocol):
    """Computes log-probabilities of tokens under a model that need not have sampled them."""

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the log-probability of every token after the first, at temperature 1.

        Raises:
            EngineError: the model cannot score the sequences.
        """
        ...


class Algorithm(Protocol):
    """Assigns credit: arithmetic on rewards, without tensors or state between steps."""

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        """Return the advantages of a step's groups; a group without credit has no learning signal.

        `past` holds the completed steps, oldest first: an algorithm reads running statistics from
        it instead of keeping state, so that a resumed run assigns the same credit. It may be
        called again with more groups of the same step.
        """
        ...


class TrainingBackend(Protocol):
    """Updates the weights from rows, whatever algorithm assigned their advantages."""

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        """Accumulate the gradient of the loss, a sum over the rows' sampled tokens.

        Raises:
            NonFiniteUpdate: the rows or their loss are not finite; the gradient is cleared.
        """
        ...

    async def recompute_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with the log-probabilities of the current weights as old ones."""
        ...

    async def optim_step(self, adam: AdamStep) -> Metrics:
        """Apply the gradient and clear it.

        Raises:
            NonFiniteUpdate: the gradient is not finite; it is cleared and nothing is changed.
        """
        ...

    def take_log_ratios(self) -> Mapping[GenerationId, Sequence[float]]:
        """Return and forget log(trainer's / sampler's probability) of every trained token.

        By generation, of its first `forward_backward` since the last call. For display only: a
        trainer that does not know them returns none.
        """
        return {}

    async def publish(self) -> int:
        """Make the engine serve the current weights; return their version."""
        ...

    async def snapshot(self) -> Callable[[Path], None]:
        """Return a function that writes a checkpoint of the present state to a folder, atomically.

        It may run in any thread, while the weights are sampled from and updated.
        """
        ...

    async def save(self, folder: Path) -> None:
        """Write a checkpoint (weights, optimizer, version) atomically."""
        ...

    async def restore(self, folder: Path) -> None:
        """Load a checkpoint of `save`. Raises TrainerError if it does not fit the model."""
        ...

    async def export(self, folder: Path) -> None:
        """Write the weights for other tools: a PEFT adapter or a model folder."""
        ...


class Collector(Protocol):
    """Runs rollouts and returns them as groups."""

    async def collect(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """Run the rollouts that have not ended; return one group per group name, in order."""
        ...

    async def begin(self, rollouts: Sequence[Rollout]) -> None:
        """Enqueue the rollouts that are not known yet, without waiting."""
        ...

    async def wait(self, rollouts: Sequence[str]) -> None:
        """Return once all of these rollouts, enqueued before, have ended."""
        ...


class Tracker(Protocol):
    """Sends metrics to an experiment tracker. May block, and may raise anything."""

    last_step: int
    """The last step logged, by this process or an earlier one; 0 if none, 1 is the first."""

    def step(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        ...

    def finish(self, result: Metrics) -> None:
        """Log the result of the run."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...
