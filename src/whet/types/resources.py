"""Resources: prompt templates, gateway addresses, and the rollout as an agent sees it."""

import string
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

from pydantic import field_validator

from whet.types.rollouts import Attempt, AttemptId, Resource, Rollout, Value


class PromptTemplate(Value):
    """A prompt with placeholders: `{name}`, and `{{` for a brace.

    Placeholders are plain names, without attributes or indexes: a template may come from a model
    and must not reach into the objects it is formatted with.
    """

    template: str

    @field_validator("template")
    @classmethod
    def _has_only_names(cls, template: str) -> str:
        for name in _list_placeholders(template):
            if not name.isidentifier():
                raise ValueError(
                    f"invalid placeholder {{{name}}} in the prompt template: expected a name, "
                    "such as {question}; write {{ and }} for braces"
                )
        return template

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the placeholders, each once."""
        return tuple(dict.fromkeys(_list_placeholders(self.template)))

    def format(self, **values: object) -> str:
        """Fill every placeholder; values without a placeholder are ignored.

        Raises:
            KeyError: a placeholder has no value.
        """
        missing = [name for name in self.names if name not in values]
        if missing:
            raise KeyError(
                f"missing values for the prompt template: {', '.join(missing)}; found "
                f"{', '.join(values) or 'none'}"
            )
        return self.template.format(**{name: str(values[name]) for name in self.names})


def _list_placeholders(template: str) -> Iterator[str]:
    for _, name, spec, conversion in string.Formatter().parse(template):
        if name is not None:
            yield name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")


class AttemptedRollout(Rollout):
    """A rollout with the attempt that runs it, as an agent sees it."""

    attempt: AttemptId
    number: int
    """1 for the first."""

    @classmethod
    def from_attempt(cls, attempt: Attempt) -> Self:
        """Build from an attempt."""
        rollout = attempt.rollout
        fields = {name: getattr(rollout, name) for name in Rollout.model_fields}
        return cls.model_construct(**fields, attempt=attempt.id, number=attempt.number)


TRAINER = "trainer"
"""Resource whose versions are the epochs of a run's trainers: `HOST:FOLDER`."""

GATEWAY_PREFIX = "gateway-"
"""Prefix of the resources by which gateways announce themselves: `{"url": ..., "model": ...}`."""


POLICY_PREFIX = "policy-"
"""Names of the resources that locate the weights of one of several policies."""
RUNNERS_PREFIX = "runners-"
"""Prefix of the resources that set the size of a pool of runners: `{"num": ...}`."""


class GatewayAddress(NamedTuple):
    """An announced gateway."""

    url: str
    """Base URL without a path; `/v1` and the paths of attempts are below it."""
    model: str


def find_gateways(resources: Iterable[Resource]) -> list[GatewayAddress]:
    """Return the gateways that have announced themselves and not withdrawn."""
    found: list[GatewayAddress] = []
    for resource in resources:
        if resource.name.startswith(GATEWAY_PREFIX):
            match resource.value:
                case {"url": str(url), "model": str(model)}:
                    found.append(GatewayAddress(url, model))
                case _:  # withdrawn
                    pass
    return found
