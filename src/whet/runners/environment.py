"""Environment variables are of the process; attempts that share one must not change them apart.

Python tells of every change before it happens, to whoever has asked (PEP 578), in the context of
whoever makes it: so it is known which attempt that is.
"""

import logging
import os
import sys
from functools import cache

from whet.errors import AgentFailed
from whet.runners.running import Running, running

logger = logging.getLogger(__name__)

_changed = set[str]()
"""What agents have set for all attempts of this process."""


@cache
def guard_environment() -> None:
    """Watch what agents do to the environment, for the rest of the process."""
    sys.addaudithook(_on_event)


def restore_environment(now: Running) -> None:
    """Undo what the agent of an attempt that was alone has changed."""
    changed, now.environment = now.environment, {}
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _on_event(event: str, args: tuple[object, ...]) -> None:
    if event in ("os.putenv", "os.unsetenv") and (now := running.get()) is not None:
        name, *value = [os.fsdecode(part) for part in args if isinstance(part, bytes)]
        if not now.has_ended:
            _on_change(now, name, value[0] if value else None)


def _on_change(now: Running, name: str, value: str | None) -> None:
    current = os.environ.get(name)
    if value == current:
        return
    if now.is_alone:
        now.environment.setdefault(name, current)
        return
    advice = "give it to the client instead, or run agents in processes (runner.processes)"
    if value is not None and (now.llm.base_url in value or now.llm.api_key in value):
        raise AgentFailed(
            f"the agent sets os.environ[{name!r}] to its own endpoint, where other attempts of "
            f"this process would find it: {advice}"
        )
    if name in _changed:
        raise AgentFailed(
            f"the agent changes os.environ[{name!r}] again and otherwise, which other attempts "
            f"of this process share: {advice}"
        )
    _changed.add(name)
    logger.warning(
        "an agent sets an environment variable for all attempts of this process name=%s attempt=%s",
        name,
        now.attempt.id,
    )
