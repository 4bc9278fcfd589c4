"""Our own modules that need extras, and what commands load by name."""

import importlib
from collections.abc import Callable
from typing import Any

from whet.errors import MissingExtra
from whet.runners.loading import load_function

__all__ = ["load_function", "with_extra"]


def with_extra(module: str, name: str, extra: str = "local") -> Callable[..., Any]:
    """A function of a module that needs an extra. Any: it is imported by name."""
    try:
        return vars(importlib.import_module(module))[name]
    except ModuleNotFoundError as error:
        raise MissingExtra.of(f"this command ({error})", extra) from error
