"""`whet.Trainer`: what `whet.train` takes, in two steps."""

from collections.abc import Sequence
from typing import Any

from pydantic import JsonValue
from rich.console import Console

from whet.app.algorithm import OwnAlgorithm
from whet.app.api import train
from whet.app.dry_run import DryRun, dry_run
from whet.app.given import Given, Surroundings, as_resources
from whet.app.tasks import Tasks
from whet.config import merge
from whet.errors import ConfigError
from whet.protocols import Algorithm
from whet.runners.agent import Agent
from whet.runners.hooks import Hooks


class Trainer:
    """Settings first, then `fit` or `dev`; each is one call of `whet.train` or `whet dev`."""

    def __init__(
        self,
        *,
        algorithm: Algorithm | OwnAlgorithm | dict[str, JsonValue] | str | None = None,
        tracer: str | None = None,
        n_workers: int | None = None,
        resources: Given | None = None,
        hooks: Sequence[Hooks] = (),
        store: str | None = None,
        quiet: bool = False,
        **settings: JsonValue,
    ) -> None:
        """`n_workers` attempts run at once, which is `runner.concurrency`; `tracer` keeps the spans
        of the agent's SDK, which is `runner.tracer`. `algorithm` is one of your own, a function
        marked with `@whet.algorithm`, the name of one, or keys of the config; `settings` are
        further keys of it.

        Raises:
            ConfigError: something the caller can mend.
        """
        settings = _with_runner(settings, "n_workers", "concurrency", n_workers)
        settings = _with_runner(settings, "tracer", "tracer", tracer)
        named: dict[str, JsonValue] = {"name": algorithm} if isinstance(algorithm, str) else {}
        self._algorithm = named if isinstance(algorithm, str) else algorithm
        self._resources = resources
        self._hooks = tuple(hooks)
        self._store = store
        self._quiet = quiet
        self._tracer = tracer
        self._settings = settings

    def fit(
        self,
        agent: Agent,
        train_data: Tasks,
        *,
        val_data: Tasks | None = None,
        resume: bool = False,
    ) -> Any:  # Any: a Result, or what a function marked with @whet.algorithm returns
        """Train the model behind the agent, and compare it with the base on `val_data`."""
        if isinstance(self._algorithm, OwnAlgorithm):
            if self._hooks or resume:
                raise ConfigError("a function marked with @whet.algorithm takes no hooks or resume")
            return self._algorithm.run(
                agent,
                train_data,
                held_out=val_data or (),
                resources=as_resources(self._resources),
                store=self._store,
                quiet=self._quiet,
                **self._settings,
            )
        return train(
            agent,
            train_data,
            held_out=val_data,
            algorithm=self._algorithm,
            resources=self._resources,
            hooks=self._hooks,
            tracer=self._tracer,
            resume=resume,
            store=self._store,
            quiet=self._quiet,
            **self._settings,
        )

    def dev(self, agent: Agent, tasks: Tasks, *, samples: int = 3) -> DryRun:
        """Run the agent on the first tasks without training, and show what happened."""
        keys = {"algorithm": self._algorithm} if isinstance(self._algorithm, dict) else {}
        return dry_run(
            agent,
            tasks,
            merge(self._settings, keys),
            Console(quiet=self._quiet),
            samples=samples,
            surroundings=Surroundings(as_resources(self._resources), self._hooks),
        )


def _with_runner(
    settings: dict[str, JsonValue], name: str, key: str, value: int | str | None
) -> dict[str, JsonValue]:
    """The settings with a key of the runner's that has a name of its own."""
    if value is None:
        return settings
    runner = settings.get("runner", {})
    if isinstance(runner, dict) and key in runner:
        raise ConfigError(f"{name} is runner.{key}: give one of them")
    return merge(settings, {"runner": {key: value}})
