"""Agents: functions or classes of the user, their parameters, and the arguments they get."""

import difflib
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from whet.errors import AgentFailed, ConfigError, boundary
from whet.types import Attempt, AttemptedRollout, Endpoint, Mode, PromptTemplate

Agent = Callable[..., Any] | object
"""A function with parameters among `PARAMETERS`, async or not; or a class, or an object of one,
with such methods `rollout`, `training_rollout`, `validation_rollout`. It returns its reward.
Any: the task is the user's own JSON, and the result is checked at run time."""

A = TypeVar("A", bound=Agent)
M = TypeVar("M", bound=BaseModel)

PARAMETERS = {
    "task": "one item of the dataset",
    "llm": "the endpoint of the model: base_url, api_key, model",
    "llms": "llms['policy'] is llm; each of several policies is there by its name, and so is every "
    "resource that is an endpoint",
    "resources": "the values of the rollout's resources, by name",
    "prompt_template": "the rollout's resource that is a prompt template",
    "rollout": "the attempt: its id, number, and rollout with id, group and mode",
}
"""Parameters that an agent may have."""

METHODS: Mapping[Mode, tuple[str, ...]] = {
    Mode.TRAIN: ("training_rollout", "rollout"),
    Mode.VAL: ("validation_rollout", "rollout"),
    Mode.TEST: ("validation_rollout", "rollout"),
}
"""Methods of an agent class by mode; the first that exists is called."""

POLICY = "policy"
"""Name of the trained model: its key in `llms`, and the resource that locates its weights."""


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """A function of the agent, and the parameters it takes."""

    function: Callable[..., Any]
    positional: tuple[str, ...]
    keywords: frozenset[str]
    is_async: bool

    @property
    def parameters(self) -> frozenset[str]:
        """Names among `PARAMETERS` that it takes."""
        return self.keywords.union(self.positional)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function with the arguments it takes. Any: its arguments and its result."""
        positional = [arguments[name] for name in self.positional]
        return self.function(*positional, **{name: arguments[name] for name in self.keywords})


@dataclass(frozen=True, slots=True)
class InspectedAgent:
    """A valid agent, with its entrypoint for each mode."""

    name: str
    entrypoints: Mapping[Mode, Entrypoint]

    @property
    def parameters(self) -> frozenset[str]:
        """Names among `PARAMETERS` that it takes in any mode."""
        return frozenset[str]().union(*(each.parameters for each in self.entrypoints.values()))


def rollout(agent: A) -> A:
    """Mark a function or class as an agent, and check its parameters.

    They are among `task`, `llm`, `llms`, `resources`, `prompt_template` and `rollout`; it returns
    its reward, or emits it.

    Raises:
        ConfigError: a parameter is unknown, or `task` is missing.
    """
    check_agent(agent)
    return agent


def check_agent(agent: object) -> None:
    """Raise ConfigError for an object that cannot be run as an agent."""
    # A class is not instantiated here: it may need something that exists only when it runs.
    _find_methods(agent) if isinstance(agent, type) else inspect_agent(agent)


def inspect_agent(agent: object) -> InspectedAgent:
    """Find the entrypoints of an agent. A class is instantiated first, without arguments.

    Raises:
        ConfigError: the object is not a valid agent.
    """
    name = get_name(agent)
    if isinstance(agent, type):
        _find_methods(agent)
        with boundary(ConfigError, f"cannot make the agent {name!r} without arguments"):
            agent = agent()
    methods = _find_methods(agent)
    entrypoints = {each: _inspect_function(each, name) for each in methods.values()}
    return InspectedAgent(name, {mode: entrypoints[each] for mode, each in methods.items()})


def get_name(agent: object) -> str:
    """Return the name of an agent or hook for messages."""
    return getattr(agent, "__name__", type(agent).__name__)


async def await_result(result: Awaitable[object] | object) -> object:
    """Return the result of a user's function, awaited if it is awaitable."""
    return await result if inspect.isawaitable(result) else result


def _find_methods(agent: object) -> dict[Mode, Callable[..., Any]]:
    found = {
        name: method
        for name in ("rollout", "training_rollout", "validation_rollout")
        if callable(method := getattr(agent, name, None))
    }
    if found:
        missing = [mode.value for mode, names in METHODS.items() if not found.keys() & set(names)]
        if missing:
            raise ConfigError(
                f"the agent {get_name(agent)!r} has only {', '.join(found)}: add a method "
                f"`rollout` for mode {' and '.join(missing)}"
            )
        return {
            mode: next(found[name] for name in names if name in found)
            for mode, names in METHODS.items()
        }
    is_callable = "__call__" in dir(agent) if isinstance(agent, type) else callable(agent)
    if not is_callable or (isinstance(agent, type) and not inspect.isfunction(agent.__call__)):
        raise ConfigError(
            "an agent is a function (task, llm), or has a method `rollout`; "
            f"found {get_name(agent)!r}"
        )
    assert callable(agent)
    return dict.fromkeys(METHODS, agent)


def _inspect_function(function: Callable[..., Any], agent: str) -> Entrypoint:
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a callable written in C has no signature
        return Entrypoint(function, ("task", "llm"), frozenset(), is_async)
    slots = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional: list[str] = []
    for index, parameter in enumerate(slots):
        if (name := _match_positional(index, parameter, slots)) is not None:
            positional.append(name)
        elif parameter.default is not parameter.empty:
            break  # it and those after it keep their defaults, or are passed by name
        else:
            raise _build_unknown_parameter_error(agent, parameter.name)
    if not slots and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        positional = ["task", "llm"]
    by_name = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    by_name |= {p.name: p for p in slots[len(positional) :] if p.kind is not p.POSITIONAL_ONLY}
    for name, parameter in by_name.items():
        if name not in PARAMETERS and parameter.default is parameter.empty:
            raise _build_unknown_parameter_error(agent, name)
    keywords = frozenset(by_name.keys() & PARAMETERS.keys())
    if "task" not in {*positional, *keywords}:
        raise ConfigError(f"the agent {agent!r} does not take the task: add a parameter `task`")
    return Entrypoint(function, tuple(positional), keywords, is_async)


def _match_positional(
    index: int, parameter: inspect.Parameter, slots: list[inspect.Parameter]
) -> str | None:
    """Return the argument of a positional parameter: by its name, else task first, llm second."""
    if parameter.name in PARAMETERS:
        return parameter.name
    names = {p.name for p in slots}
    if parameter.default is parameter.empty and not _close_matches(parameter.name):
        if index == 0 and "task" not in names:
            return "task"
        if index == 1 and not names & {"llm", "llms"}:
            return "llm"
    return None


def _close_matches(name: str) -> list[str]:
    return difflib.get_close_matches(name, PARAMETERS, n=1, cutoff=0.75)


def _build_unknown_parameter_error(agent: str, name: str) -> ConfigError:
    close = _close_matches(name)
    suggestion = f", perhaps {close[0]!r}" if close else ""
    return ConfigError(
        f"the agent {agent!r} has an unknown parameter {name!r}{suggestion}; expected one of "
        f"{', '.join(PARAMETERS)}"
    )


# --------------------------------------------------------------------------- arguments


class KeyedEndpoint(BaseModel):
    """An endpoint as a resource: its key is in an environment variable of the runner."""

    model_config = ConfigDict(extra="forbid")

    base_url: str
    model: str
    key_variable: str

    def resolve(self) -> Endpoint:
        """Return the endpoint with its key. Raises AgentFailed if the variable is not set."""
        key = os.environ.get(self.key_variable)
        if key is None:
            raise AgentFailed(
                f"the endpoint {self.base_url} has its key in {self.key_variable}, which is not "
                "set where the agent runs"
            )
        return Endpoint(base_url=self.base_url, api_key=key, model=self.model)


def build_arguments(
    parameters: frozenset[str], attempt: Attempt, llm: Endpoint, resources: Mapping[str, JsonValue]
) -> dict[str, Any]:
    """Return a value for each of `PARAMETERS` that an agent takes. Any: of each its own type.

    Raises:
        AgentFailed: the rollout lacks a resource that the agent needs.
    """
    arguments: dict[str, Any] = {"task": attempt.rollout.task, "llm": llm}
    if "resources" in parameters:
        arguments["resources"] = dict(resources)
    if "llms" in parameters:
        policies = {name: llm.model_copy(update={"model": name}) for name in llm.policies}
        arguments["llms"] = {POLICY: llm, **_find_endpoints(resources), **policies}
    if "prompt_template" in parameters:
        arguments["prompt_template"] = _find_template(resources)
    if "rollout" in parameters:
        arguments["rollout"] = AttemptedRollout.from_attempt(attempt)
    return arguments


def check_resources(parameters: frozenset[str], resources: Mapping[str, JsonValue]) -> None:
    """Raise ConfigError for resources that an agent cannot run with."""
    if "prompt_template" in parameters:
        try:
            _find_template(resources)
        except AgentFailed as error:
            raise ConfigError(str(error)) from error
    if POLICY in _find(resources, Endpoint) | _find(resources, KeyedEndpoint):
        raise ConfigError(f"a resource that is an endpoint cannot be called {POLICY!r}")


def _find_template(resources: Mapping[str, JsonValue]) -> PromptTemplate:
    found = _find(resources, PromptTemplate)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise AgentFailed(
            f"the agent takes prompt_template, but its rollout has {', '.join(sorted(found))}: "
            "use the parameter `resources` instead"
        )
    raise AgentFailed(
        "the agent takes prompt_template, but its rollout has none: add a resource such as "
        '{"template": "Answer {question}"}'
    )


def _find_endpoints(resources: Mapping[str, JsonValue]) -> dict[str, Endpoint]:
    keyed = _find(resources, KeyedEndpoint)
    return _find(resources, Endpoint) | {name: each.resolve() for name, each in keyed.items()}


def _find(resources: Mapping[str, JsonValue], model: type[M]) -> dict[str, M]:
    """Return the resources that have the keys of a model, all required ones and no others."""
    required = {key for key, field in model.model_fields.items() if field.is_required()}
    found: dict[str, M] = {}
    for name, value in resources.items():
        if isinstance(value, dict) and required <= value.keys() <= model.model_fields.keys():
            try:
                found[name] = model.model_validate(value)
            except ValidationError as error:
                reason = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise AgentFailed(
                    f"the resource {name!r} is not a valid {model.__name__}: {reason}"
                ) from error
    return found
