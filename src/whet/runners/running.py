"""The attempt that is running here, and what its agent tells of it from anywhere inside."""

import asyncio
import hashlib
import math
import re
import weakref
from contextvars import ContextVar
from numbers import Real
from typing import Any

from whet.errors import AgentFailed, AttemptError, BadReward, ConfigError
from whet.types import Attempt, CallId, Endpoint, Reward, Span, Target

REPLY_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|msg_|resp_)")
"""What wire formats put before the id of a call."""


class Running:
    """An attempt at work, and what it has told so far."""

    def __init__(self, attempt: Attempt, llm: Endpoint, *, is_alone: bool = False) -> None:
        """`is_alone`: no other runs in this process meanwhile."""
        self.is_alone = is_alone
        self.environment: dict[str, str | None] = {}
        """Variables that its agent has changed, as they were."""
        self.attempt = attempt
        self.llm = llm
        self.rewards: list[Reward] = []
        self.spans: list[Span] = []
        self.trace_id = hashlib.blake2b(attempt.id.encode(), digest_size=16).hexdigest()
        self.tasks = weakref.WeakSet[asyncio.Task[Any]]()
        """Those its agent began. Any: whatever they come to."""
        self.has_ended = False

    def aside(self) -> "Running":
        """The same attempt for code beside its agent: what it tells is told together."""
        other = Running(self.attempt, self.llm, is_alone=self.is_alone)
        other.rewards, other.spans = self.rewards, self.spans
        other.environment = self.environment
        return other

    def add_reward(self, reward: Reward) -> None:
        """Remember what the agent gave; whoever runs it passes it on."""
        self.rewards.append(reward)

    def add_span(self, span: Span) -> None:
        """Remember what the agent did."""
        self.spans.append(span)


running: ContextVar[Running | None] = ContextVar("running", default=None)
"""Copied into tasks, and into threads by `asyncio.to_thread` and the like."""


def inside(what: str) -> Running:
    """The attempt this code belongs to. Raises ConfigError if it belongs to none."""
    now = running.get()
    if now is None:
        raise ConfigError(
            f"{what} works inside an agent that whet is running, in its tasks, and in threads "
            "that copy the context, as asyncio.to_thread does"
        )
    if now.has_ended:
        raise ConfigError(f"{what} came too late: the attempt {now.attempt.id!r} has ended")
    return now


def emit_reward(
    value: float,
    key: str = "reward",
    *,
    call: str | None = None,
    turn: int | None = None,
    agent: str | None = None,
) -> None:
    """Give the running attempt a reward; the last one named `reward` counts if none is returned.

    It may be for a part of the attempt instead: for the answer of one `call`, by the id of the
    reply; for the answers with `turn` others before them in their conversation; for those of an
    `agent`. Such rewards need `algorithm.credit` by `turn`, and an attempt has its own besides.

    Raises:
        BadReward: the value is not a finite number, or the turn none from 0 on.
    """
    now = inside("emit_reward")
    if turn is not None and turn < 0:
        raise BadReward(f"turns are counted from 0; found a reward for turn {turn}")
    target = None
    if call is not None or turn is not None or agent is not None:
        id = None if call is None else CallId(REPLY_PREFIX.sub("", call))
        target = Target(call=id, turn=turn, agent=agent)
    now.add_reward(Reward(value=finite(value), key=key, target=target))


def final_reward(returned: object, rewards: list[Reward]) -> float:
    """What an attempt earned: what the agent returned, or the last reward it emitted."""
    if returned is not None:
        return finite(returned)
    own = (r.value for r in reversed(rewards) if r.key == "reward" and r.target is None)
    last = next(own, None)
    if last is None:
        raise BadReward("no reward: return a number, or call whet.emit_reward(...)")
    return last


def failure_of(error: BaseException) -> AttemptError:
    """Whatever came out of an agent, as the reason its attempt failed for."""
    if isinstance(error, AttemptError):
        return error
    said = " ".join(str(error).split())
    return AgentFailed(f"the agent raised: {type(error).__name__}: {said}")


def finite(value: object) -> float:
    """A reward as a float. Raises BadReward for anything that is not a finite number."""
    if not isinstance(value, Real):
        raise BadReward(f"a reward is a number; found {type(value).__name__} {value!r:.80}")
    number = float(value)
    if not math.isfinite(number):
        raise BadReward(f"a reward is a finite number; found {number}")
    return number
