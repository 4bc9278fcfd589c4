"""Detect agents that modify os.environ while other attempts share the process.

An audit hook (PEP 578) is called before each change, in the context of the code that makes it:
the only way to know which of many concurrent attempts it was.
"""

import logging
import os
import sys
from functools import cache

from whet.errors import AgentFailed
from whet.runners.context import AttemptContext, active_attempt

logger = logging.getLogger(__name__)

ADVICE = (
    "pass it to the client instead, or give each attempt a process (runner.processes as many as "
    "runner.concurrency)"
)

_changed = set[str]()
"""Variables that agents have set for all attempts of this run in this process."""


@cache  # an audit hook cannot be removed: once in a process
def guard_environment() -> None:
    """Watch changes of the environment for the rest of the process."""
    sys.addaudithook(_on_audit_event)


def forget_changes() -> None:
    """Let the agents of a new run set variables that those of an earlier one have set."""
    _changed.clear()


def restore_environment(context: AttemptContext) -> None:
    """Undo the changes of an attempt that had the process to itself."""
    changed, context.environment = context.environment, {}
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _on_audit_event(event: str, args: tuple[object, ...]) -> None:
    if event in ("os.putenv", "os.unsetenv") and (context := active_attempt.get()) is not None:
        name, *value = [os.fsdecode(part) for part in args if isinstance(part, bytes)]
        if not context.has_ended:
            _check_change(context, name, value[0] if value else None)


def _check_change(context: AttemptContext, name: str, value: str | None) -> None:
    current = os.environ.get(name)
    if value == current:
        return
    if context.is_alone:
        context.environment.setdefault(name, current)
        return
    if value is not None and (context.llm.base_url in value or context.llm.api_key in value):
        raise AgentFailed(
            f"the agent sets os.environ[{name!r}] to its own endpoint, where other attempts of "
            f"this process would find it: {ADVICE}"
        )
    if name in _changed:
        raise AgentFailed(
            f"the agent sets os.environ[{name!r}] to a second value, but other attempts of this "
            f"process share it: {ADVICE}"
        )
    _changed.add(name)
    logger.warning(
        "an agent sets an environment variable for all attempts of this process name=%s attempt=%s",
        name,
        context.attempt.id,
    )
