"""`whet.Trainer`: `whet.train` as a class, which gets settings first, then agent and tasks."""

from collections.abc import Sequence
from typing import Any

from pydantic import JsonValue

from whet.app.cli.display import open_console
from whet.app.composition.driver import Driver
from whet.app.inputs import AgentInputs, ResourceValues, Tasks, parse_resources
from whet.app.inspection.dev_run import DevRun, dev_run
from whet.app.train import train
from whet.app.verl.algorithm import VERL
from whet.app.verl.train import train_verl
from whet.config import merge, resolve
from whet.errors import ConfigError
from whet.protocols import Algorithm
from whet.runners.agent import Agent
from whet.runners.hooks import Hooks
from whet.runners.judges.judge import Judge


class Trainer:
    """Settings of runs, for `fit` (`whet.train`) and `dev` (`whet dev`)."""

    def __init__(
        self,
        *,
        algorithm: Algorithm | Driver | VERL | dict[str, JsonValue] | str | None = None,
        tracer: str | None = None,
        n_workers: int | None = None,
        runner: dict[str, JsonValue] | str | None = None,
        resources: ResourceValues | None = None,
        hooks: Sequence[Hooks] = (),
        judge: Judge | None = None,
        store: str | None = None,
        quiet: bool = False,
        **settings: JsonValue,
    ) -> None:
        """`n_workers` attempts run at once (`runner.concurrency`); `tracer` records the spans of
        the agent's SDK (`runner.tracer`). `runner` is keys of its section, or "ray" for runners on
        the Ray cluster of this machine (`runner.ray`). `algorithm` is an object of your own, a
        `whet.VERL`, a function marked with `@whet.algorithm`, a name, or keys of the config. A
        `judge` ranks the answers of each training group; `settings` are further keys.

        Raises:
            ConfigError: invalid input.
        """
        if runner is not None:
            settings = {**settings, "runner": _read_runner(runner)}
        settings = _with_runner(settings, "n_workers", "concurrency", n_workers)
        settings = _with_runner(settings, "tracer", "tracer", tracer)
        if isinstance(algorithm, VERL):
            if "trainer" in settings:
                raise ConfigError(
                    "whet.VERL sets the config section 'trainer': pass only one of them"
                )
            settings = {**settings, "trainer": algorithm.settings}
            algorithm = None
        named: dict[str, JsonValue] = {"name": algorithm} if isinstance(algorithm, str) else {}
        self._algorithm = named if isinstance(algorithm, str) else algorithm
        self._resources = resources
        self._hooks = tuple(hooks)
        self._judge = judge
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
    ) -> Any:  # Any: a Result, what a driver returns, or a summary of a run of verl
        """Train the model behind the agent, and compare it with the base on `val_data`."""
        if isinstance(self._algorithm, Driver):
            if self._hooks or self._judge or resume:
                raise ConfigError(
                    "a function marked with @whet.algorithm takes no hooks, judge or resume: leave "
                    "them out"
                )
            return self._algorithm.run(
                agent,
                train_data,
                held_out=val_data or (),
                resources=parse_resources(self._resources),
                store=self._store,
                quiet=self._quiet,
                **self._settings,
            )
        if resolve(self._settings).trainer.kind == "verl":
            return self._fit_with_verl(agent, train_data, val_data, resume=resume)
        return train(
            agent,
            train_data,
            held_out=val_data,
            algorithm=self._algorithm,
            resources=self._resources,
            hooks=self._hooks,
            judge=self._judge,
            tracer=self._tracer,
            resume=resume,
            store=self._store,
            quiet=self._quiet,
            **self._settings,
        )

    def _fit_with_verl(
        self, agent: Agent, train_data: Tasks, val_data: Tasks | None, *, resume: bool
    ) -> Any:
        if self._hooks or self._judge or self._resources or self._tracer:
            raise ConfigError(
                "runs of verl take no hooks, judge, resources or tracer: leave them out"
            )
        if self._algorithm is not None and not isinstance(self._algorithm, dict):
            found = type(self._algorithm).__name__
            raise ConfigError(f"with verl, `algorithm` is a name, such as 'grpo'; found {found}")
        keys = {"algorithm": self._algorithm} if self._algorithm else {}
        return train_verl(
            agent,
            train_data,
            held_out=val_data,
            resume=resume,
            store=self._store,
            quiet=self._quiet,
            settings=merge(self._settings, keys),
        )

    def dev(self, agent: Agent, tasks: Tasks, *, samples: int = 3) -> DevRun:
        """Run the agent on the first tasks without training, and print what was recorded."""
        keys = {"algorithm": self._algorithm} if isinstance(self._algorithm, dict) else {}
        return dev_run(
            agent,
            tasks,
            merge(self._settings, keys),
            open_console(quiet=self._quiet),
            samples=samples,
            agent_inputs=AgentInputs(parse_resources(self._resources), self._hooks),
        )


def _read_runner(runner: dict[str, JsonValue] | str) -> dict[str, JsonValue]:
    if isinstance(runner, dict):
        return runner
    if runner != "ray":
        raise ConfigError(f"invalid runner {runner!r}: expected 'ray', or keys of the section")
    return {"ray": "auto"}


def _with_runner(
    settings: dict[str, JsonValue], name: str, key: str, value: int | str | None
) -> dict[str, JsonValue]:
    """Settings with a key of the runner that has an argument of its own."""
    if value is None:
        return settings
    runner = settings.get("runner", {})
    if isinstance(runner, dict) and key in runner:
        raise ConfigError(f"{name} and runner.{key} are one setting: pass only one of them")
    return merge(settings, {"runner": {key: value}})
