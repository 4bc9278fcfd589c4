"""Users' own code around attempts."""

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
from anyio import to_thread

from whet.errors import AgentFailed, ConfigError, WhetError, boundary
from whet.runners.agent import awaited, name_of
from whet.runners.in_process import Room
from whet.runners.loading import load_function
from whet.runners.running import Running
from whet.types import Attempt, Outcome

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
"""Of one hook."""


class Hooks:
    """Override what you need; each may be async. Several attempts run at once, so do hooks."""

    def on_start(self, runner: str) -> Any:
        """A runner of this name begins. What it raises keeps it from starting."""

    def before(self, attempt: Attempt) -> Any:
        """An attempt is about to run. What it raises is the reason this attempt fails for."""

    def after(self, attempt: Attempt, outcome: Outcome) -> Any:
        """An attempt has ended so, and is reported next. What it raises is logged."""

    def on_end(self, runner: str) -> Any:
        """The runner ends. What it raises is logged."""


def load_hooks(specs: Sequence[str]) -> list[Hooks]:
    """Those that `module:Class`, or `module:object`, name.

    Raises:
        ConfigError: there are none.
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
    """Refuse what is no hook. Raises ConfigError."""
    if not isinstance(hook, Hooks):
        raise ConfigError(f"a hook is an object of a subclass of whet.Hooks; found {hook!r:.80}")
    return hook


class HookRunner:
    """Calls hooks: before an attempt in their order, after it in the opposite one."""

    def __init__(self, hooks: Sequence[Hooks], room: Room) -> None:
        self._hooks = tuple(check_hook(hook) for hook in hooks)
        self._room = room
        self._started: list[Hooks] = []

    async def on_start(self, runner: str) -> None:
        """Raises ConfigError if one raises."""
        for hook in self._hooks:
            with boundary(ConfigError, f"the hook {name_of(hook)}.on_start raised"):
                await _alone(partial(hook.on_start, runner))
            self._started.append(hook)

    async def on_end(self, runner: str) -> None:
        """Tell all that have started, whatever they raise."""
        for hook in reversed(self._started):
            try:
                with boundary(WhetError, f"the hook {name_of(hook)}.on_end raised"):
                    await _alone(partial(hook.on_end, runner))
            except WhetError as error:
                logger.warning("%s", error)

    async def before(self, now: Running) -> None:
        """Raises AgentFailed if one raises; those after it are not called."""
        for hook in self._hooks:
            try:
                await self._call(now, partial(hook.before, now.attempt))
            except WhetError as error:
                raise AgentFailed(f"the hook {name_of(hook)}.before {_why(error)}") from error

    async def after(self, now: Running, outcome: Outcome) -> None:
        """Tell all, whatever they raise."""
        for hook in reversed(self._hooks):
            try:
                await self._call(now, partial(hook.after, now.attempt, outcome))
            except WhetError as error:
                logger.warning("the hook %s.after %s", name_of(hook), _why(error))

    async def _call(self, now: Running, hook: Callable[[], Any]) -> None:
        async def work() -> float:
            await self._room.call(hook, is_async=_is_async(hook))
            return 0.0

        await self._room.run(now.aside(), work, LIMIT_S)


def _why(error: WhetError) -> str:
    return str(error).removeprefix("the agent ")


def _is_async(hook: Callable[[], Any]) -> bool:
    return isinstance(hook, partial) and inspect.iscoroutinefunction(hook.func)


async def _alone(hook: Callable[[], Any]) -> None:
    with anyio.fail_after(LIMIT_S):
        await awaited(hook() if _is_async(hook) else await to_thread.run_sync(hook))
