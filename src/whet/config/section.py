"""Base of the config's sections, and its values by their keys."""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ConfigDict, JsonValue


class Section(BaseModel):
    """A part of the config: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def changed_keys(section: Section) -> set[str]:
    """Keys whose values are not the defaults."""
    fields = type(section).model_fields
    return {name for name in fields if getattr(section, name) != fields[name].default}


def list_leaves(
    values: Mapping[str, JsonValue], prefix: str = ""
) -> Iterator[tuple[str, JsonValue]]:
    """The values of a nested config by their dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from list_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
