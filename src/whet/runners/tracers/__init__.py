"""Tracers record the spans that an agent's SDK creates with the attempt that created them.

A tracer is installed once in a process; the contextvar of the running attempt attributes each span.
"""

import importlib
from importlib.util import find_spec

from whet.config import TracerName
from whet.errors import ConfigError, MissingExtra

REQUIREMENTS: dict[TracerName, tuple[str, str]] = {
    "otel": ("opentelemetry.sdk", ""),
    "openai-agents": ("agents.tracing", "openai-agents"),
}
"""A required module, and the package to install if it is missing; that of `otel` is an extra."""


def check_tracer(name: TracerName) -> None:
    """Raise ConfigError if the package of a tracer is not installed."""
    module, package = REQUIREMENTS[name]
    try:
        is_installed = find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        is_installed = False
    if not is_installed:
        if not package:
            raise MissingExtra.build(f"the tracer {name!r} ({module})", name)
        raise ConfigError(f"the tracer {name!r} needs {module!r}: pip install '{package}'")


def install_tracer(name: TracerName) -> None:
    """Record the spans of this process with its attempts. Idempotent.

    Raises:
        ConfigError: the package is not installed, or is configured so that no spans reach us.
    """
    check_tracer(name)
    module = importlib.import_module(f"whet.runners.tracers.{name.replace('-', '_')}")
    vars(module)["install"]()
