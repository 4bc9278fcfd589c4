"""`Trainer`: an algorithm, an agent and a store, run together."""

import asyncio
import importlib
import threading
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from whet.agl.adapter import TraceAdapter, TracerTraceToTriplet
from whet.agl.algorithm.apo import APO
from whet.agl.algorithm.base import (
    Algorithm,
    Baseline,
    FastAlgorithm,
    FunctionalAlgorithm,
    list_tasks,
)
from whet.agl.algorithm.verl import VERL
from whet.agl.execution import (
    ClientServerExecutionStrategy,
    ExecutionStrategy,
    SharedMemoryExecutionStrategy,
)
from whet.agl.litagent import LitAgent
from whet.agl.native import build_agent
from whet.agl.runner import LitAgentRunner
from whet.agl.store.base import LightningStore
from whet.agl.store.memory import InMemoryLightningStore
from whet.agl.tracer import AgentOpsTracer, Tracer
from whet.agl.types import Dataset, Hook, NamedResources
from whet.errors import ConfigError

T = TypeVar("T")

Spec = Any
"""A component: an object, its class, a function that makes it, `package.Class`, or a dict of
`type` and arguments. Any: each component has a type of its own."""

STRATEGIES = {"shm": SharedMemoryExecutionStrategy, "cs": ClientServerExecutionStrategy}


class Trainer:
    """Runs an algorithm and the runners of an agent on a store."""

    def __init__(
        self,
        *,
        dev: bool = False,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: Spec = None,
        adapter: Spec = None,
        store: Spec = None,
        runner: Spec = None,
        strategy: Spec = None,
        port: int | None = None,
        algorithm: Spec = None,
        llm_proxy: Spec = None,
        n_workers: int | None = None,
        max_tasks: int | None = None,
        daemon: bool = True,
        triplet_exporter: Spec = None,
        hooks: Hook | Sequence[Hook] | None = None,
    ) -> None:
        """Raises ConfigError for an invalid component, NotImplementedError for a proxy."""
        if llm_proxy is not None:
            raise NotImplementedError(
                "whet.agl has no LLMProxy: VERL's calls go through whet's gateway, which records "
                "their tokens; other endpoints are LLM resources"
            )
        self._is_dev = dev
        self.n_runners = n_runners or n_workers or 1
        self.max_rollouts = max_rollouts if max_rollouts is not None else max_tasks
        self.initial_resources = initial_resources
        self.port = port
        self.tracer: Tracer = build_component(tracer, Tracer, "tracer") or AgentOpsTracer()
        self.adapter: TraceAdapter = (
            build_component(adapter or triplet_exporter, TraceAdapter, "adapter")
            or TracerTraceToTriplet()
        )
        self.algorithm: Algorithm | None = build_component(algorithm, Algorithm, "algorithm")
        self.strategy = self._build_strategy(strategy)
        self.store: LightningStore = (
            build_component(store, LightningStore, "store") or InMemoryLightningStore()
        )
        self._runner = runner
        self.hooks = (hooks,) if isinstance(hooks, Hook) else tuple(hooks or ())

    def fit(
        self,
        agent: LitAgent,
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
        val_data: Dataset[Any] | None = None,
    ) -> Any:
        """Run the algorithm to its end; `val_data` is `val_dataset`.

        Returns what `whet.train` returns, if the algorithm is `VERL`, and what `whet.APO` returns,
        if it is `APO`.

        Raises:
            ConfigError: the agent is invalid, or there are no tasks to train on.
        """
        val_dataset = val_dataset if val_dataset is not None else val_data
        algorithm = Baseline() if self._is_dev or self.algorithm is None else self.algorithm
        return self._run(agent, algorithm, train_dataset, val_dataset)

    def dev(
        self,
        agent: LitAgent,
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Run the agent on the tasks without learning.

        Raises:
            TypeError: the trainer's algorithm is not a FastAlgorithm.
        """
        algorithm = self.algorithm or Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(
                f"dev() needs a FastAlgorithm such as Baseline; found {type(algorithm).__name__}"
            )
        self._run(agent, algorithm, train_dataset, val_dataset)

    def fit_v0(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError: this is the protocol of version 0.1."""
        raise NotImplementedError("fit_v0 is the protocol of Agent Lightning 0.1: use fit")

    def _run(
        self,
        agent: LitAgent,
        algorithm: Algorithm,
        train: Dataset[Any] | None,
        val: Dataset[Any] | None,
    ) -> Any:
        if not isinstance(cast(object, agent), LitAgent):
            raise ConfigError(
                f"expected a LitAgent or a function with @rollout, found {type(agent).__name__}"
            )
        agent.set_trainer(self)
        if isinstance(algorithm, (VERL, APO)):
            return self._train(algorithm, agent, list_tasks(train), list_tasks(val))
        algorithm.set_trainer(self)
        algorithm.set_adapter(self.adapter)
        if self.initial_resources is not None:
            algorithm.set_initial_resources(self.initial_resources)

        async def run_algorithm(store: LightningStore, event: threading.Event) -> None:
            algorithm.set_store(store)
            await self._seed_resources(algorithm, store)
            if algorithm.is_async():
                await cast(Any, algorithm.run(train, val))
            else:
                await asyncio.to_thread(algorithm.run, train, val)

        async def run_runner(store: LightningStore, worker_id: int, event: threading.Event) -> None:
            runner = self._build_runner()
            with runner.run_context(
                agent=agent, store=store, hooks=self.hooks, worker_id=worker_id
            ):
                await runner.iter(event=event)

        self.strategy.execute(run_algorithm, run_runner, self.store)
        return None

    def _train(
        self, algorithm: VERL | APO, agent: LitAgent, train: list[Any], val: list[Any]
    ) -> Any:
        """Run VERL or APO, which whet implements itself."""
        if not train:
            raise ConfigError(f"{type(algorithm).__name__} needs a train_dataset with tasks")
        initial = self.initial_resources or {}
        function = build_agent(agent, self.tracer, self.hooks, initial)
        runner = {"concurrency": self.n_runners, "processes": 0}
        if isinstance(algorithm, APO):
            return algorithm.search(function, train, val, initial, runner=runner)
        algorithm.settings["runner"] = {**runner, **algorithm.settings.get("runner", {})}
        return algorithm.train(function, train, val)

    async def _seed_resources(self, algorithm: Algorithm, store: LightningStore) -> None:
        """Add the initial resources for a function that does not ask for them."""
        if (
            isinstance(algorithm, FunctionalAlgorithm)
            and self.initial_resources is not None
            and "initial_resources" not in algorithm.names
        ):
            await store.add_resources(self.initial_resources)

    def _build_strategy(self, spec: Spec) -> ExecutionStrategy:
        if isinstance(spec, str) and spec in STRATEGIES:
            spec = STRATEGIES[spec]
        if isinstance(spec, dict) and cast(dict[str, Any], spec).get("type") in STRATEGIES:
            spec = {**cast(dict[str, Any], spec), "type": STRATEGIES[cast(Any, spec)["type"]]}
        options: dict[str, Any] = {"n_runners": self.n_runners}
        if self.port is not None:
            options["server_port"] = self.port
        built = build_component(spec, ExecutionStrategy, "strategy", **options)
        if built is None:
            return ClientServerExecutionStrategy(**options)
        if self.port is not None and isinstance(built, ClientServerExecutionStrategy):
            built.server_port = self.port
        return built

    def _build_runner(self) -> LitAgentRunner:
        options: dict[str, Any] = {"tracer": self.tracer, "max_rollouts": self.max_rollouts}
        built = build_component(self._runner, LitAgentRunner, "runner", **options)
        return built or LitAgentRunner(**options)


def build_component(spec: Spec, kind: type[T], name: str, **options: Any) -> T | None:
    """Build a component from its spec; arguments of the spec take precedence over `options`.

    Raises:
        ConfigError: the result is not a `kind`.
    """
    if spec is None or isinstance(spec, kind):
        return spec
    if isinstance(spec, dict):
        arguments = dict(cast(dict[str, Any], spec))
        spec, options = arguments.pop("type", None), {**options, **arguments}
    if isinstance(spec, str):
        spec = _import_component(spec, name)
    if callable(spec):
        made = spec(**options) if isinstance(spec, type) else spec()
        if isinstance(made, kind):
            return made
        spec = made
    raise ConfigError(f"invalid {name}: expected {kind.__name__}; found {spec!r:.80}")


def _import_component(path: str, name: str) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"cannot import the {name} {path!r}: {error}") from error
