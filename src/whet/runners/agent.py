"""What an agent is: anything callable with a task and a model endpoint, that gives a reward."""

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from numbers import Real
from typing import Any, TypeVar

from pydantic import JsonValue

from whet.errors import BadReward, ConfigError
from whet.types import CallId, Reward, Target

Agent = Callable[..., Any]
"""`(task, llm) -> reward`, async or not; one that also takes `resources` is given those of its
rollout, values by name. Any: the task is the user's own JSON, and the result is
checked when it comes."""

A = TypeVar("A", bound=Agent)

REPLY_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|msg_|resp_)")
"""What wire formats put before the id of a call."""

emitted: ContextVar[list[Reward] | None] = ContextVar("emitted", default=None)
"""The rewards of the attempt that is running here."""


def rollout(agent: A) -> A:
    """Mark a function as an agent: it takes `(task, llm)` and gives a reward.

    Raises:
        ConfigError: it cannot be called that way.
    """
    check_agent(agent)
    return agent


def check_agent(agent: object) -> None:
    """Refuse what cannot be run as an agent, before anything is started."""
    if not callable(agent):
        raise ConfigError(f"an agent is a function (task, llm); found {type(agent).__name__!r}")
    try:
        inspect.signature(agent).bind("task", "llm", **asked_for(agent, {}))
    except TypeError as error:
        raise ConfigError(
            f"an agent takes (task, llm); {_name(agent)!r} takes {inspect.signature(agent)}"
        ) from error
    except ValueError:
        return  # A callable written in C shows no signature; calling it will tell.


def asked_for(agent: Agent, resources: Mapping[str, JsonValue]) -> dict[str, Any]:
    """What the agent takes besides task and endpoint. Any: its own arguments."""
    try:
        wants = "resources" in inspect.signature(agent).parameters
    except ValueError:
        wants = False
    return {"resources": dict(resources)} if wants else {}


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
    rewards = emitted.get()
    if rewards is None:
        raise ConfigError("emit_reward works inside an agent that whet is running")
    if turn is not None and turn < 0:
        raise BadReward(f"turns are counted from 0; found a reward for turn {turn}")
    target = None
    if call is not None or turn is not None or agent is not None:
        id = None if call is None else CallId(REPLY_PREFIX.sub("", call))
        target = Target(call=id, turn=turn, agent=agent)
    rewards.append(Reward(value=finite(value), key=key, target=target))


def final_reward(returned: object, rewards: list[Reward]) -> float:
    """What an attempt earned: what the agent returned, or the last reward it emitted."""
    if returned is not None:
        return finite(returned)
    own = (r.value for r in reversed(rewards) if r.key == "reward" and r.target is None)
    last = next(own, None)
    if last is None:
        raise BadReward("no reward: return a number, or call whet.emit_reward(...)")
    return last


def finite(value: object) -> float:
    """A reward as a float. Raises BadReward for anything that is not a finite number."""
    if not isinstance(value, Real):
        raise BadReward(f"a reward is a number; found {type(value).__name__} {value!r:.80}")
    number = float(value)
    if not math.isfinite(number):
        raise BadReward(f"a reward is a finite number; found {number}")
    return number


def is_async(agent: Agent) -> bool:
    """Whether calling the agent gives something to await: an async function, or such a class."""
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__)


async def awaited(result: Awaitable[object] | object) -> object:
    """The result itself, whether the agent gave it or a promise of it."""
    return await result if inspect.isawaitable(result) else result


def _name(agent: Agent) -> str:
    return getattr(agent, "__name__", type(agent).__name__)
