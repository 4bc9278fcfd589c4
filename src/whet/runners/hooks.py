"""Hooks: users' own code around attempts."""

from collections.abc import Sequence
from typing import Any

from whet.errors import ConfigError, boundary
from whet.runners.loading import load_function
from whet.types import Attempt, Outcome


class Hooks:
    """Override what you need; each may be async. Attempts run concurrently, and so do hooks."""

    def on_start(self, runner: str) -> Any:
        """Called when a runner of this name starts. An exception keeps it from starting."""

    def before(self, attempt: Attempt) -> Any:
        """Called before an attempt runs. An exception fails the attempt, with its message."""

    def after(self, attempt: Attempt, outcome: Outcome) -> Any:
        """Called after an attempt, before its outcome is reported. An exception is logged."""

    def on_end(self, runner: str) -> Any:
        """Called when the runner ends. An exception is logged."""


def load_hooks(specs: Sequence[str]) -> list[Hooks]:
    """Load hooks by `module:Class` or `module:object`.

    Raises:
        ConfigError: a spec names no hook.
    """
    found: list[Hooks] = []
    for spec in specs:
        hook = load_function(spec, "hook")
        if isinstance(hook, type):
            with boundary(ConfigError, f"cannot make the hook {spec!r} without arguments"):
                hook = hook()
        found.append(check_hook(hook))
    return found


def check_hook(hook: object) -> Hooks:
    """Return the hook. Raises ConfigError for any other object."""
    if not isinstance(hook, Hooks):
        raise ConfigError(f"a hook is an object of a subclass of whet.Hooks; found {hook!r:.80}")
    return hook
