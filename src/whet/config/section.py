"""Base of the config's sections."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the config: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def changed_keys(section: Section) -> set[str]:
    """Keys whose values are not the defaults."""
    fields = type(section).model_fields
    return {name for name in fields if getattr(section, name) != fields[name].default}
