"""`@whet.algorithm`: a function that steers a run, and gets what it names."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

from whet.app.loading import with_extra
from whet.app.tasks import Tasks
from whet.errors import ConfigError
from whet.runners.agent import Agent

KNOWN = {
    "store": "the run's store: enqueue, wait, trajectories, publish and all else of protocols.py",
    "tasks": "the training tasks, a list",
    "held_out": "the held-out tasks, a list",
    "resources": "the versions of the resources it was started with, by name",
    "gateway": "the endpoint of the policy for calls of its own, which are never recorded",
    "trainer": "the trainer: forward_backward, optim_step, publish, save, restore, export",
    "scorer": "how likely tokens are to the weights as they are trained, by `logprobs`",
    "config": "the run's config",
}
"""What an algorithm may name as a parameter."""


class OwnAlgorithm:
    """A user's algorithm; called, it is the function it was."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises ConfigError if it asks for something that there is not."""
        self.function = function
        self.__doc__ = function.__doc__
        self.names = _names(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: whatever the function takes
        return self.function(*args, **kwargs)

    def run(
        self,
        agent: Agent | None = None,
        tasks: Tasks = (),
        *,
        held_out: Tasks = (),
        resources: Mapping[str, JsonValue] | None = None,
        store: str | None = None,
        quiet: bool = False,
        **settings: JsonValue,
    ) -> Any:  # Any: what the function returns
        """Run it with everything it names; `settings` are keys of the config.

        The agent is run in this process; with a `store`, or WHET_STORE in the environment,
        `whet serve` and `whet runner` do that at the store. `resources` are published first.

        Raises:
            ConfigError: something the caller can mend; nothing was started.
        """
        run_algorithm = with_extra("whet.app.algorithm_run", "run_algorithm")
        return run_algorithm(
            self,
            agent,
            tasks,
            held_out=held_out,
            resources=dict(resources or {}),
            store=store,
            quiet=quiet,
            settings=settings,
        )


def algorithm(function: Callable[..., Any]) -> OwnAlgorithm:
    """Mark a function, async or not, as an algorithm: its parameters say what it gets.

    They are among `store`, `tasks`, `held_out`, `resources`, `gateway`, `trainer`, `scorer`,
    `config`.

    Raises:
        ConfigError: one of them is none of these.
    """
    return OwnAlgorithm(function)


def _names(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    name = getattr(function, "__name__", type(function).__name__)
    for asked in required:
        if asked not in KNOWN:
            raise ConfigError(
                f"the algorithm {name!r} asks for {asked!r}; there are {', '.join(KNOWN)}"
            )
    return frozenset(p.name for p in parameters) & set(KNOWN)
