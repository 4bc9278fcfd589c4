"""What an agent is: a function or a class of the user's, and how it is called."""

import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from whet.errors import ConfigError, boundary
from whet.types import Mode

Agent = Callable[..., Any] | object
"""A function that names what it takes (see `KNOWN`), async or not; or a class, or an object of
one, with such methods `rollout`, `training_rollout`, `validation_rollout`. It returns its reward.
Any: the task is the user's own JSON, and the result is checked when it comes."""

A = TypeVar("A", bound=Agent)

KNOWN = {
    "task": "what the dataset holds",
    "llm": "the endpoint of the model: base_url, api_key, model",
    "llms": "the same as llms['policy'], and every resource that is an endpoint, by name",
    "resources": "the values of the rollout's resources, by name",
    "prompt_template": "the rollout's resource that is a prompt template",
    "rollout": "the attempt: its id, number, and rollout with id, group and mode",
}
"""What an agent may name as a parameter."""

METHODS: Mapping[Mode, tuple[str, ...]] = {
    Mode.TRAIN: ("training_rollout", "rollout"),
    Mode.VAL: ("validation_rollout", "rollout"),
    Mode.TEST: ("validation_rollout", "rollout"),
}
"""Of a class: the first there is runs a rollout of the mode."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A function of the agent's, and what it takes."""

    function: Callable[..., Any]
    positional: tuple[str, ...]
    keywords: frozenset[str]
    is_async: bool

    @property
    def names(self) -> frozenset[str]:
        """What of `KNOWN` it takes."""
        return self.keywords.union(self.positional)

    def call(self, given: Mapping[str, Any]) -> Any:
        """Call it with what it takes. Any: what there is to give, and what it returns."""
        positional = [given[name] for name in self.positional]
        return self.function(*positional, **{name: given[name] for name in self.keywords})


@dataclass(frozen=True, slots=True)
class ReadAgent:
    """An agent that was found to be one."""

    name: str
    entries: Mapping[Mode, Entry]

    @property
    def names(self) -> frozenset[str]:
        """What of `KNOWN` it takes in any mode."""
        return frozenset[str]().union(*(entry.names for entry in self.entries.values()))


def rollout(agent: A) -> A:
    """Mark a function or class as an agent: its parameters say what it gets.

    They are among `task`, `llm`, `llms`, `resources`, `prompt_template` and `rollout`; it returns
    its reward, or emits it.

    Raises:
        ConfigError: it asks for something that there is not.
    """
    check_agent(agent)
    return agent


def check_agent(agent: object) -> None:
    """Refuse what cannot be run as an agent, before anything is started."""
    # Marking a class must not make one: it may need what there is only when it runs.
    _methods(agent) if isinstance(agent, type) else read_agent(agent)


def read_agent(agent: object) -> ReadAgent:
    """How an agent is called. A class is made into an object first, without arguments.

    Raises:
        ConfigError: it is none.
    """
    name = name_of(agent)
    if isinstance(agent, type):
        _methods(agent)
        with boundary(ConfigError, f"cannot make the agent {name!r} without arguments"):
            agent = agent()
    methods = _methods(agent)
    entries = {function: _entry(function, name) for function in methods.values()}
    return ReadAgent(name, {mode: entries[function] for mode, function in methods.items()})


def name_of(agent: object) -> str:
    """What to call an agent when there is something to say of it."""
    return getattr(agent, "__name__", type(agent).__name__)


async def awaited(result: Awaitable[object] | object) -> object:
    """The result itself, whether the agent gave it or a promise of it."""
    return await result if inspect.isawaitable(result) else result


def _methods(agent: object) -> dict[Mode, Callable[..., Any]]:
    found = {
        name: method
        for name in ("rollout", "training_rollout", "validation_rollout")
        if callable(method := getattr(agent, name, None))
    }
    if found:
        lacking = [mode.value for mode, names in METHODS.items() if not found.keys() & set(names)]
        if lacking:
            raise ConfigError(
                f"the agent {name_of(agent)!r} has only {', '.join(found)}: add a method "
                f"`rollout` for mode {' and '.join(lacking)}"
            )
        return {
            mode: next(found[name] for name in names if name in found)
            for mode, names in METHODS.items()
        }
    is_callable = "__call__" in dir(agent) if isinstance(agent, type) else callable(agent)
    if not is_callable or (isinstance(agent, type) and not inspect.isfunction(agent.__call__)):
        raise ConfigError(
            "an agent is a function (task, llm), or has a method `rollout`; "
            f"found {name_of(agent)!r}"
        )
    assert callable(agent)
    return dict.fromkeys(METHODS, agent)


def _entry(function: Callable[..., Any], agent: str) -> Entry:
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # A callable written in C shows no signature; calling it will tell.
        return Entry(function, ("task", "llm"), frozenset(), is_async)
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional: list[str] = []
    for place, parameter in enumerate(places):
        if (name := _at_place(place, parameter, places)) is not None:
            positional.append(name)
        elif parameter.default is not parameter.empty:
            break  # it and those after it have their own values, or are given by name
        else:
            raise _unknown(agent, parameter.name)
    if not places and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        positional = ["task", "llm"]
    by_name = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    by_name |= {p.name: p for p in places[len(positional) :] if p.kind is not p.POSITIONAL_ONLY}
    for name, parameter in by_name.items():
        if name not in KNOWN and parameter.default is parameter.empty:
            raise _unknown(agent, name)
    keywords = frozenset(by_name.keys() & KNOWN.keys())
    if "task" not in {*positional, *keywords}:
        raise ConfigError(f"the agent {agent!r} does not take the task: add a parameter `task`")
    return Entry(function, tuple(positional), keywords, is_async)


def _at_place(
    place: int, parameter: inspect.Parameter, places: list[inspect.Parameter]
) -> str | None:
    """What a parameter is given: what it names, else the task if it is first, the llm if second."""
    if parameter.name in KNOWN:
        return parameter.name
    named = {p.name for p in places}
    if parameter.default is parameter.empty and not _close(parameter.name):
        if place == 0 and "task" not in named:
            return "task"
        if place == 1 and not named & {"llm", "llms"}:
            return "llm"
    return None


def _close(name: str) -> list[str]:
    return difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.75)


def _unknown(agent: str, name: str) -> ConfigError:
    close = _close(name)
    perhaps = f", perhaps {close[0]!r}" if close else ""
    return ConfigError(
        f"the agent {agent!r} asks for {name!r}{perhaps}; there are {', '.join(KNOWN)}"
    )
