"""Agents behind an HTTP service: one request for each attempt."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import urlsplit

import anyio
from pydantic import JsonValue

from whet.errors import AgentFailed, ConfigError
from whet.io.attempt_url import parse_attempt_ids
from whet.io.http_client import ConnectError, HttpClient, Response, TransportError
from whet.io.text import hide_passwords
from whet.runners.context import active_attempt
from whet.runners.executors.external_agents import (
    fetch_posted_rewards,
    get_last_reward,
    parse_reward,
)
from whet.types import Endpoint, Rollout

logger = logging.getLogger(__name__)

RewardFunction = Callable[[JsonValue, Any], float | Awaitable[float]]
"""`(task, answer) -> reward`, async or not. Any: the service's own JSON."""

RECONNECT_PAUSE_S = 0.5
MAX_ANSWER_BYTES = 32 * 2**20
SHOWN_CHARS = 300

RESERVED_KEYS = {"self", "trace_id", "sampling_params", "max_turns", "llm"}
"""Parameters of `Service.chat`, which gets the keys of a task besides."""

HINT = "answer with a JSON object that has `reward`, post one to the reward_url, or pass reward="


class Service:
    """An agent behind an HTTP service: a plain `POST /chat` with JSON in and out.

    Subclass it and override `chat` for a service with another API. A service that cannot be
    connected to is waited for while it restarts; any other error fails the attempt, and only the
    queue retries.
    """

    def __init__(
        self,
        url: str = "",
        *,
        reward: RewardFunction | None = None,
        max_turns: int = 10,
        concurrency: int | None = None,
        patience_s: float = 60.0,
    ) -> None:
        """Requests go to the path of `url`, or to `/chat` if it has none.

        `reward` computes the reward of an answer in the runner. `concurrency` limits the attempts
        that the service gets at once. `patience_s` is how many seconds to wait for a service that
        cannot be connected to.

        Raises:
            ConfigError: the URL is invalid.
        """
        self.__name__ = type(self).__name__
        self.url = _check_url(url) if url else ""
        self._shown_url = hide_passwords(self.url)
        self.max_turns = max_turns
        self.patience_s = patience_s
        self._has_warned = False
        self._reward = reward
        self._semaphore = None if concurrency is None else anyio.Semaphore(concurrency)

    async def chat(
        self,
        trace_id: str,
        sampling_params: dict[str, Any],
        max_turns: int,
        *,
        llm: Endpoint,
        **sample: Any,
    ) -> Any:
        """Send a sample to the service and return its answer. Any: the service's own JSON.

        The service sends `trace_id` as a header of its model calls, or uses `llm` as it is: both
        attribute the calls to the attempt. A task that is not an object is `sample["task"]`.

        Raises:
            AgentFailed: it gave no answer.
        """
        rewards = {"reward_url": f"{llm.base_url}/rewards", "reward_key": llm.reward_key}
        body = {
            "trace_id": trace_id,
            "sampling_params": sampling_params,
            "max_turns": max_turns,
            "llm": {
                **llm.model_dump(exclude={"reward_key"}),
                "headers": {"trace_id": trace_id},
                "traces_url": f"{llm.base_url}/traces",
                **(rewards if self._reward is None else {}),
            },
            "sample": sample,
        }
        return await self._post(body)

    async def __call__(
        self, task: JsonValue, llm: Endpoint, rollout: Rollout | None = None
    ) -> float:
        """Run one attempt and return its reward."""
        sample = cast(dict[str, Any], task) if isinstance(task, dict) else {"task": task}
        if taken := RESERVED_KEYS & sample.keys():
            raise AgentFailed(
                f"the task has the key {min(taken)!r}, which a service gets beside the task: "
                "rename it in the tasks"
            )
        sampling = {} if rollout is None else rollout.sampling.model_dump(exclude_none=True)
        attempt = parse_attempt_ids(llm.base_url).attempt
        chat = self.chat(attempt, sampling, self.max_turns, llm=llm, **sample)
        if self._semaphore is None:
            answer = await chat
        else:
            async with self._semaphore:
                answer = await chat
        if self._reward is not None:
            reward = self._reward(task, answer)
            return await reward if isinstance(reward, Awaitable) else reward
        reward = parse_reward(answer)
        if reward is not None:
            return reward
        return get_last_reward(await fetch_posted_rewards(llm), HINT)

    async def _post(self, body: dict[str, Any]) -> JsonValue:
        """Send the request, waiting for a service that cannot be connected to."""
        if not self.url:
            raise ConfigError("a Service needs a URL, or a method `chat` of its own")
        deadline = anyio.current_time() + self.patience_s
        async with HttpClient() as http:
            while True:
                _set_timeout_reason(f"the service {self._shown_url!r} has not answered")
                try:
                    reply = await http.request(
                        "POST", self.url, json=body, max_bytes=MAX_ANSWER_BYTES
                    )
                    _set_timeout_reason("")
                    return _parse_answer(reply, self._shown_url)
                except ConnectError as error:
                    reason = f"cannot connect to the service {self._shown_url!r}: {error}"
                    if anyio.current_time() + RECONNECT_PAUSE_S > deadline:
                        raise AgentFailed(reason) from error
                    _set_timeout_reason(reason)
                    self._warn_waiting()
                except TransportError as error:
                    raise AgentFailed(
                        f"the service {self._shown_url!r} gave no answer: {error}"
                    ) from error
                await anyio.sleep(RECONNECT_PAUSE_S)

    def _warn_waiting(self) -> None:
        """Log once that a service is not there."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "waiting up to %g s for the service %s", self.patience_s, self._shown_url
            )


def _set_timeout_reason(reason: str) -> None:
    """Set what a timeout of this attempt would be due to, from now on."""
    if (context := active_attempt.get()) is not None:
        context.timeout_reason = reason


def _parse_answer(reply: Response, url: str) -> JsonValue:
    text = reply.body.decode(errors="replace")
    if reply.status != 200:
        shown = " ".join(text.split())[:SHOWN_CHARS]
        raise AgentFailed(f"the service {url!r} answered {reply.status}: {shown}")
    try:
        return reply.json()
    except ValueError as error:
        raise AgentFailed(
            f"the service {url!r} did not answer with JSON: {text[:SHOWN_CHARS]!r}"
        ) from error


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"a service has a URL such as http://host:8001/chat; found {hide_passwords(url)!r}"
        )
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/chat"
