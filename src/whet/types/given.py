"""What agents are given besides their task and their model."""

import string
from collections.abc import Iterator
from typing import Self

from pydantic import field_validator

from whet.types.work import Attempt, AttemptId, Rollout, Value


class PromptTemplate(Value):
    """A prompt with places for values: `{name}`, and `{{` for a brace.

    Only names: a template may come from a model, and one that reached into the values it is given
    would reach anything.
    """

    template: str

    @field_validator("template")
    @classmethod
    def _has_only_names(cls, template: str) -> str:
        for place in _places(template):
            if not place.isidentifier():
                raise ValueError(
                    f"a place in a prompt template is a name, such as {{question}}; found "
                    f"{{{place}}}; write {{{{ and }}}} for braces"
                )
        return template

    @property
    def names(self) -> tuple[str, ...]:
        """The places it has, each once."""
        return tuple(dict.fromkeys(_places(self.template)))

    def format(self, **values: object) -> str:
        """The prompt with every place filled; values it has no place for are left out.

        Raises:
            KeyError: a place has no value.
        """
        missing = [name for name in self.names if name not in values]
        if missing:
            raise KeyError(
                f"the prompt template asks for {', '.join(missing)}; there are "
                f"{', '.join(values) or 'no values'}"
            )
        return self.template.format(**{name: str(values[name]) for name in self.names})


def _places(template: str) -> Iterator[str]:
    for _, name, spec, conversion in string.Formatter().parse(template):
        if name is not None:
            yield name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")


class AttemptedRollout(Rollout):
    """A rollout, and which attempt at it this is."""

    attempt: AttemptId
    number: int
    """1 for the first."""

    @classmethod
    def of(cls, attempt: Attempt) -> Self:
        """As the agent of an attempt sees it."""
        rollout = attempt.rollout
        fields = {name: getattr(rollout, name) for name in Rollout.model_fields}
        return cls.model_construct(**fields, attempt=attempt.id, number=attempt.number)
