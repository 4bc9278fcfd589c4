"""`openenv:URL`: an environment server of OpenEnv, played turn by turn over its WebSocket."""

import json
from collections.abc import Sequence
from typing import Any, cast

from pydantic import JsonValue

from whet.errors import AgentFailed, ConfigError, boundary
from whet.runners.environments.completion import JsonMessage, complete
from whet.runners.environments.environment import Options, Split, import_package, read_count
from whet.types import Endpoint

FIRST_SEED: dict[Split, int] = {"train": 0, "held_out": 1_000_000_000}
KEYS = ("system", "action", "observation", "max_turns", "max_tokens")


class OpenEnvServer:
    """Episodes of a server, one for each seed.

    The model sees each observation as text, and its reply is the action: a JSON object, or a text
    for the field that the option `action` names. The reward is the sum over the steps.
    """

    def __init__(self, url: str, options: Options) -> None:
        unknown = [key for key in options if key not in KEYS]
        if unknown:
            raise ConfigError(
                f"openenv has no option {unknown[0]!r}: expected one of {', '.join(KEYS)}"
            )
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"openenv takes the URL of a running server; found {url!r}")
        self._url = url
        self._options = options
        self._max_turns = read_count(options, "max_turns", 10)
        self._max_tokens = read_count(options, "max_tokens", 512)
        self._client = import_package("openenv.core.generic_client", "openenv").GenericEnvClient

    def list_tasks(self, split: Split, count: int) -> Sequence[JsonValue]:
        return [{"seed": FIRST_SEED[split] + number} for number in range(count)]

    async def rollout(self, task: JsonValue, llm: Endpoint) -> float:
        match task:
            case {"seed": int(seed)}:
                pass
            case _:
                raise AgentFailed(f"not a task of openenv: {task!r:.80}")
        messages: list[JsonMessage] = []
        if system := self._options.get("system"):
            messages.append({"role": "system", "content": system})
        total = 0.0
        with boundary(AgentFailed, f"the OpenEnv server {self._url} failed"):
            async with self._client(base_url=self._url) as server:
                result = await server.reset(seed=seed)
                for _ in range(self._max_turns):
                    messages.append({"role": "user", "content": self._show(result.observation)})
                    reply = await complete(llm, messages, max_tokens=self._max_tokens)
                    messages.append({"role": "assistant", "content": reply})
                    result = await server.step(self._parse_action(reply))
                    total += float(result.reward or 0.0)
                    if result.done:
                        break
        return total

    def _show(self, observation: Any) -> str:  # Any: the server's own JSON
        field = self._options.get("observation")
        if isinstance(observation, dict) and isinstance(field, str):
            found = cast(dict[str, Any], observation)
            if field not in found:
                raise AgentFailed(f"the observation has no {field!r}: it has {', '.join(found)}")
            observation = found[field]
        return observation if isinstance(observation, str) else json.dumps(observation)

    def _parse_action(self, reply: str) -> dict[str, JsonValue]:
        field = self._options.get("action")
        if isinstance(field, str):
            return {field: reply.strip()}
        try:
            value = json.loads(reply)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise AgentFailed(
                f"the action is not a JSON object: {reply[:80]!r}; name a field for the text with "
                "the option action=FIELD"
            )
        return cast(dict[str, JsonValue], value)


def open_environment(name: str, options: Options) -> OpenEnvServer:
    """Open a server by its URL."""
    return OpenEnvServer(name, options)
