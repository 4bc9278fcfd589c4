"""Spans that an agent's SDK makes of itself, kept with the attempt whose agent makes them.

A tracer is for a whole process, and is put into it once; the contextvar of the running attempt says
whose a span is.
"""

import importlib
from importlib.util import find_spec

from whet.config import TracerName
from whet.errors import ConfigError

NEEDS: dict[TracerName, tuple[str, str]] = {
    "otel": ("opentelemetry.sdk", "whet[otel]"),
    "openai-agents": ("agents.tracing", "openai-agents"),
}
"""A module that must be there, and what to install if it is not."""


def check_tracer(name: TracerName | None) -> None:
    """Refuse a tracer whose package is not installed, before anything is started."""
    if name is None:
        return
    module, package = NEEDS[name]
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # not even what it is in
        is_there = False
    if not is_there:
        raise ConfigError(f"the tracer {name!r} needs {module!r}: pip install '{package}'")


def install_tracer(name: TracerName | None) -> None:
    """Have the spans of a process kept with its attempts. Twice is once.

    Raises:
        ConfigError: the package is not installed, or is set up in a way that keeps spans from us.
    """
    if name is None:
        return
    check_tracer(name)
    module = importlib.import_module(f"whet.runners.tracers.{name.replace('-', '_')}")
    vars(module)["install"]()
