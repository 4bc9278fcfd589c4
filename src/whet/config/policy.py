"""Config section of a policy, where a run has several."""

from pathlib import Path

from pydantic import Field, JsonValue

from whet.config.section import Section

Keys = dict[str, JsonValue]


class PolicyConfig(Section):
    """One of several policies of a run, by the name that agents send as their model. Its sections
    have the keys that differ from those of the run."""

    model: str | None = None
    """Its model, or the adapter or checkpoint it starts from; that of the run if absent."""
    start: Path | None = None
    """The adapter or checkpoint that it starts from, saved where `model` named one."""
    frozen: bool = False
    """Serve it and never train it."""
    models: tuple[str, ...] = ()
    """Further model names for it."""
    trainer: Keys = Field(default={})
    """Keys of `[trainer]`."""
    adam: Keys = Field(default={})
    """Keys of `[adam]`."""
    loss: Keys = Field(default={})
    """Keys of `[loss]`."""
    algorithm: Keys = Field(default={})
    """Keys of `[algorithm]`, except `oversample`."""
