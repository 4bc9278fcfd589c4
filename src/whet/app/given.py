"""The resources a run gives to its agents."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from whet.errors import ConfigError, NotFound
from whet.protocols import Resources
from whet.runners.agent import Agent, read_agent
from whet.runners.given import POLICY, check_resources
from whet.runners.hooks import Hooks
from whet.types import GATEWAY_PREFIX, Name

Given = Mapping[str, object]
"""JSON by name; a `PromptTemplate`, an `Endpoint` or another model of pydantic is written as its
JSON."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run's agent has besides its tasks."""

    resources: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    hooks: tuple[Hooks, ...] = ()


_NAME: TypeAdapter[str] = TypeAdapter(Name)
_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


def as_resources(given: Given | None) -> dict[str, JsonValue]:
    """What is published.

    Raises:
        ConfigError: a name is none, or one of ours.
    """
    found: dict[str, JsonValue] = {}
    for name, value in (given or {}).items():
        try:
            _NAME.validate_python(name)
        except ValidationError as error:
            raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error
        if name == POLICY or name.startswith(GATEWAY_PREFIX):
            raise ConfigError(f"a resource cannot be called {name!r}: whet has one of that name")
        plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        try:
            found[name] = _JSON.validate_python(plain)
        except ValidationError as error:
            kind = type(value).__name__
            raise ConfigError(f"the resource {name!r} is {kind}, and no JSON value") from error
    return found


def check_given(agent: Agent, resources: Mapping[str, JsonValue]) -> None:
    """Refuse an agent that takes what it is not given, before anything is started."""
    if not isinstance(agent, type):
        check_resources(read_agent(agent).names, resources)


async def published(store: Resources, wanted: Mapping[str, JsonValue]) -> dict[str, int]:
    """The versions of the resources, published unless they are the newest already."""
    versions: dict[str, int] = {}
    for name, value in wanted.items():
        try:
            newest = await store.latest(name)
        except NotFound:
            versions[name] = await store.publish(name, value)
        else:
            same = newest.value == value
            versions[name] = newest.version if same else await store.publish(name, value)
    return versions
