"""What the parameters of an agent stand for, in one attempt."""

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from whet.errors import AgentFailed, ConfigError
from whet.types import Attempt, AttemptedRollout, Endpoint, PromptTemplate

T = TypeVar("T", bound=BaseModel)

POLICY = "policy"
"""The model that is trained: of `llms`, as agents see it, and as the resource that says where its
weights are."""


class KeyedEndpoint(BaseModel):
    """An endpoint as a resource: its key is in a variable of whoever runs the agent."""

    model_config = ConfigDict(extra="forbid")

    base_url: str
    model: str
    key_variable: str

    def open(self) -> Endpoint:
        """With its key. Raises AgentFailed if the variable is not set."""
        key = os.environ.get(self.key_variable)
        if key is None:
            raise AgentFailed(
                f"the endpoint {self.base_url} has its key in {self.key_variable}, which is not "
                "set where the agent runs"
            )
        return Endpoint(base_url=self.base_url, api_key=key, model=self.model)


def given_to(
    names: frozenset[str], attempt: Attempt, llm: Endpoint, resources: Mapping[str, JsonValue]
) -> dict[str, Any]:
    """A value for each name of `agent.KNOWN` that was asked for. Any: they are of any kind.

    Raises:
        AgentFailed: the rollout has not what an agent asks for.
    """
    given: dict[str, Any] = {"task": attempt.rollout.task, "llm": llm}
    if "resources" in names:
        given["resources"] = dict(resources)
    if "llms" in names:
        given["llms"] = {POLICY: llm, **_endpoints(resources)}
    if "prompt_template" in names:
        given["prompt_template"] = _template(resources)
    if "rollout" in names:
        given["rollout"] = AttemptedRollout.of(attempt)
    return given


def check_resources(names: frozenset[str], resources: Mapping[str, JsonValue]) -> None:
    """Refuse resources that an agent cannot be run with, before anything is started."""
    if "prompt_template" in names:
        try:
            _template(resources)
        except AgentFailed as error:
            raise ConfigError(str(error)) from error
    if POLICY in _read(resources, Endpoint) | _read(resources, KeyedEndpoint):
        raise ConfigError(f"a resource that is an endpoint cannot be called {POLICY!r}")


def _template(resources: Mapping[str, JsonValue]) -> PromptTemplate:
    found = _read(resources, PromptTemplate)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise AgentFailed(
            f"the agent takes prompt_template, and its rollout has {', '.join(sorted(found))}: "
            "let it take `resources` instead"
        )
    raise AgentFailed(
        "the agent takes prompt_template, and its rollout has none: give it a resource such as "
        '{"template": "Answer {question}"}'
    )


def _endpoints(resources: Mapping[str, JsonValue]) -> dict[str, Endpoint]:
    keyed = _read(resources, KeyedEndpoint)
    return _read(resources, Endpoint) | {name: found.open() for name, found in keyed.items()}


def _read(resources: Mapping[str, JsonValue], kind: type[T]) -> dict[str, T]:
    """Those that have exactly the keys of a kind."""
    found: dict[str, T] = {}
    for name, value in resources.items():
        if isinstance(value, dict) and value.keys() == kind.model_fields.keys():
            try:
                found[name] = kind.model_validate(value)
            except ValidationError as error:
                why = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise AgentFailed(f"the resource {name!r} is no {kind.__name__}: {why}") from error
    return found
