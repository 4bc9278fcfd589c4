"""`Algorithm`, the base class; functions as algorithms; `Baseline`, which only runs the tasks."""

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from whet.agl.emitter import find_final_reward
from whet.agl.store.base import LightningStore
from whet.agl.types import Dataset, EnqueueRolloutRequest, NamedResources, RolloutMode

if TYPE_CHECKING:
    from whet.agl.adapter import TraceAdapter
    from whet.agl.trainer import Trainer

logger = logging.getLogger(__name__)


class Algorithm:
    """Base class of algorithms: override `run`, async or not; the setters are called before it."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._adapter: TraceAdapter | None = None
        self._store: LightningStore | None = None
        self._resources: NamedResources | None = None

    def is_async(self) -> bool:
        """Return whether `run` is async."""
        return inspect.iscoroutinefunction(self.run)

    def set_trainer(self, trainer: "Trainer") -> None:
        """Set the trainer."""
        self._trainer = trainer

    def get_trainer(self) -> "Trainer":
        """Return the trainer. Raises ValueError."""
        return _require(self._trainer, "trainer")

    def set_adapter(self, adapter: "TraceAdapter") -> None:
        """Set the adapter."""
        self._adapter = adapter

    def get_adapter(self) -> "TraceAdapter":
        """Return the adapter. Raises ValueError."""
        return _require(self._adapter, "adapter")

    def set_store(self, store: LightningStore) -> None:
        """Set the store."""
        self._store = store

    def get_store(self) -> LightningStore:
        """Return the store. Raises ValueError."""
        return _require(self._store, "store")

    def set_llm_proxy(self, llm_proxy: object) -> None:
        """Raise NotImplementedError for a proxy."""
        if llm_proxy is not None:
            raise NotImplementedError("whet.agl has no LLMProxy: whet's gateway records calls")

    def get_llm_proxy(self) -> None:
        """Return None: there is no proxy."""

    def set_initial_resources(self, resources: NamedResources) -> None:
        """Set the resources that the trainer was made with."""
        self._resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """Return the resources that the trainer was made with."""
        return self._resources

    def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> Awaitable[None] | None:
        """Run the algorithm."""
        raise NotImplementedError("override run()")


def _require(value: Any, name: str) -> Any:
    if value is None:
        raise ValueError(f"the algorithm has no {name}: pass it to Trainer(algorithm=...)")
    return value


class FunctionalAlgorithm(Algorithm):
    """A function as an algorithm; calling it calls the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        self.names = frozenset(inspect.signature(function).parameters)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> Any:
        arguments: dict[str, Any] = {
            "store": self._store,
            "adapter": self._adapter,
            "llm_proxy": None,
            "initial_resources": self._resources,
            "train_dataset": train_dataset,
            "val_dataset": val_dataset,
        }
        return self._function(**{n: v for n, v in arguments.items() if n in self.names})


def algo(func: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make a function an algorithm, async or not.

    It gets those of these it names: `store`, `train_dataset`, `val_dataset`, `adapter`,
    `llm_proxy` (None), `initial_resources`.
    """
    return FunctionalAlgorithm(func)


def list_tasks(dataset: Dataset[Any] | None) -> list[Any]:
    """Return the tasks of a dataset, which may have no iterator; without a dataset, none."""
    return [dataset[number] for number in range(len(dataset))] if dataset is not None else []


class FastAlgorithm(Algorithm):
    """Marks algorithms that `Trainer.dev` may run."""


class Baseline(FastAlgorithm):
    """Runs every task and logs the rewards, without learning."""

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 0.5,
        polling_interval: float = 5.0,
        max_queue_length: int = 4,
        span_verbosity: str = "keys",
    ) -> None:
        """Only `n_epochs` matters: the queue needs no limit, and nothing is polled."""
        super().__init__()
        self._epochs = n_epochs

    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> None:
        store = self.get_store()
        if self._resources is not None:
            await store.add_resources(self._resources)
        for epoch in range(self._epochs):
            await self._run_tasks(store, train_dataset, "train", epoch)
            await self._run_tasks(store, val_dataset, "val", epoch)

    async def _run_tasks(
        self, store: LightningStore, tasks: Dataset[Any] | None, mode: RolloutMode, epoch: int
    ) -> None:
        requests = [EnqueueRolloutRequest(input=task, mode=mode) for task in list_tasks(tasks)]
        added = await store.enqueue_many_rollouts(requests)
        ids = [rollout.rollout_id for rollout in added]
        for rollout in await store.wait_for_rollouts(ids):
            spans = await store.query_spans(rollout.rollout_id, "latest")
            logger.info(
                "epoch=%d mode=%s rollout=%s status=%s spans=%d reward=%s",
                *(epoch, mode, rollout.rollout_id, rollout.status, len(spans)),
                find_final_reward(list(spans)),
            )
