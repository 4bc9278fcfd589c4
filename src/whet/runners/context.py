"""The attempt that the current code belongs to, and the rewards it emits."""

import asyncio
import hashlib
import math
import os
import sysconfig
import traceback
import weakref
from collections.abc import Iterable
from contextlib import suppress
from contextvars import ContextVar
from itertools import dropwhile
from numbers import Real
from pathlib import Path
from typing import Any

from whet.errors import AgentFailed, AttemptError, BadReward, ConfigError
from whet.io.genai_spans import parse_response_id
from whet.types import Attempt, Endpoint, Reward, Span, Target

_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"

MAX_TRACEBACK_CHARS = 8000
"""The end of a longer traceback is kept."""


class AttemptContext:
    """A running attempt, with the rewards and spans it has emitted so far."""

    def __init__(self, attempt: Attempt, llm: Endpoint, *, is_alone: bool = False) -> None:
        """`is_alone`: no other attempt runs in this process at the same time."""
        self.is_alone = is_alone
        self.environment: dict[str, str | None] = {}
        """Environment variables that the agent has changed, with their previous values."""
        self.attempt = attempt
        self.llm = llm
        self.rewards: list[Reward] = []
        self.reward_lines: dict[Reward, str] = {}
        """Where rewards were emitted, as `file:line` of the agent."""
        self.spans: list[Span] = []
        self.trace_id = hashlib.blake2b(attempt.id.encode(), digest_size=16).hexdigest()
        self.tasks = weakref.WeakSet[asyncio.Task[Any]]()
        """Tasks that the agent has created. Any: their results are the agent's own."""
        self.has_ended = False
        self.timeout_reason = ""
        """What a timeout would be due to, if it is known."""

    def copy_for_hook(self) -> "AttemptContext":
        """Return a context for a hook of the attempt: rewards and spans are shared, tasks not."""
        other = AttemptContext(self.attempt, self.llm, is_alone=self.is_alone)
        other.rewards, other.spans = self.rewards, self.spans
        other.reward_lines = self.reward_lines
        other.environment = self.environment
        return other

    def add_reward(self, reward: Reward, line: str = "") -> None:
        """Record a reward and where it was emitted; the runner stores it when the attempt ends."""
        self.rewards.append(reward)
        self.reward_lines[reward] = line

    def add_span(self, span: Span) -> None:
        """Record a span; the runner stores it when the attempt ends."""
        self.spans.append(span)


active_attempt: ContextVar[AttemptContext | None] = ContextVar("active_attempt", default=None)
"""Copied into tasks, and into threads by `asyncio.to_thread` and the like."""


def get_current_attempt(caller: str) -> AttemptContext:
    """Return the attempt this code belongs to.

    Raises:
        ConfigError: there is none, or it has ended; the message names the caller.
    """
    context = active_attempt.get()
    if context is None:
        raise ConfigError(
            f"{caller} works inside an agent that whet is running, in its tasks, and in threads "
            "that copy the context, as asyncio.to_thread does"
        )
    if context.has_ended:
        raise ConfigError(f"{caller} came too late: the attempt {context.attempt.id!r} has ended")
    return context


def emit_reward(
    value: float,
    key: str = "reward",
    *,
    call: str | None = None,
    turn: int | None = None,
    agent: str | None = None,
) -> None:
    """Emit a reward for the running attempt; the last `reward` counts if none is returned.

    It may be for a part of the attempt instead: for one `call`, by the id of its response; for the
    calls with `turn` others before them in their conversation; for those of an `agent`. Such
    rewards need `algorithm.credit` by `turn`, and the attempt needs a reward of its own as well.

    Raises:
        BadReward: the value is not a finite number, the key cannot be encoded, or the turn is
            negative.
    """
    context = get_current_attempt("emit_reward")
    try:
        key.encode()
    except UnicodeEncodeError as error:  # nor can the store keep it
        raise BadReward(f"the key of a reward is UTF-8 text; found {key!r}") from error
    if turn is not None and turn < 0:
        raise BadReward(f"turns are counted from 0; found a reward for turn {turn}")
    target = None
    if call is not None or turn is not None or agent is not None:
        id = None if call is None else parse_response_id(call)
        target = Target(call=id, turn=turn, agent=agent)
    line = _find_user_line((f.f_code.co_filename, n) for f, n in traceback.walk_stack(None))
    context.add_reward(Reward(value=check_reward(value), key=key, target=target), line)


def resolve_reward(returned: object, emitted: list[Reward]) -> float:
    """Return the reward of an attempt: the returned one, or the last one emitted.

    Raises:
        BadReward: there is none, or it is not a finite number.
    """
    if returned is not None:
        return check_reward(returned)
    own = (r.value for r in reversed(emitted) if r.is_own)
    last = next(own, None)
    if last is None:
        others = {r.key for r in emitted if not r.is_of_judge} - {"reward"}
        raise BadReward(
            f"no reward, only {', '.join(map(repr, sorted(others)))}: return a number, or call "
            "whet.emit_reward(value) without a key as well"
            if others
            else "no reward: return a number, or call whet.emit_reward(...)"
        )
    return last


def check_reward(value: object) -> float:
    """Return a reward as a float. Raises BadReward for anything but a finite number."""
    if not isinstance(value, Real):
        found = f"a reward is a number; found {type(value).__name__} {value!r:.80}"
        several = "; give other values to whet.emit_reward(value, key=...)"
        raise BadReward(found + several * isinstance(value, tuple | list | dict))
    try:
        number = float(value)
    except OverflowError:  # of a large int
        number = math.inf
    if not math.isfinite(number):
        raise BadReward(f"a reward is a finite number; found {number}")
    return number


def as_attempt_error(error: BaseException) -> AttemptError:
    """Return an exception of the agent as the reason why its attempt failed."""
    if isinstance(error, AttemptError):
        failed = error
    else:
        failed = AgentFailed(f"the agent raised: {describe_raised(error)}")
    failed.traceback = failed.traceback or format_traceback(error)  # it may be raised again
    return failed


def describe_raised(error: BaseException) -> str:
    """Return an exception of the user's code in one line, with its line there."""
    message = " ".join(str(error).split())
    line = find_agent_line(error)
    return f"{type(error).__name__}: {message}" + (f" ({line})" if line else "")


def find_agent_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame in the user's own code; empty if there is none."""
    return _find_user_line(
        (frame.filename, frame.lineno) for frame in reversed(_extract_agent_frames(error))
    )


def _find_user_line(frames: Iterable[tuple[str, int | None]]) -> str:
    """Return the first line that is not of whet, the standard library or an installed package."""
    for name, line in frames:
        file = Path(name)
        if file.is_absolute() and not _is_library(file):
            with suppress(OSError, ValueError):  # the working folder is gone, or not above
                file = file.relative_to(Path.cwd())
            return f"{file}:{line}"
    return ""


def _is_library(file: Path) -> bool:
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    return is_installed or str(file).startswith((_PACKAGE, _STANDARD_LIBRARY))


def _extract_agent_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of a traceback from the first that is not our own code that called the agent."""
    frames = traceback.extract_tb(error.__traceback__)
    return list(dropwhile(lambda frame: frame.filename.startswith(_PACKAGE), frames))


def format_traceback(error: BaseException) -> str:
    """Format a traceback from the first frame of the user's code; empty if there is none."""
    frames = _extract_agent_frames(error)
    if not frames:
        return ""
    reason = traceback.format_exception_only(error)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames), *reason]
    return "".join(lines)[-MAX_TRACEBACK_CHARS:]
