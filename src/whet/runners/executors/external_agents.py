"""Agents outside of this process: the variables they get, and the rewards they return or post."""

import re
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

from pydantic import JsonValue

from whet.errors import AgentFailed, BadReward
from whet.io.attempt_url import parse_attempt_ids
from whet.io.http_client import HttpClient, TransportError
from whet.runners.context import check_reward
from whet.types import Endpoint, Reward

TIMEOUT_S = 30.0

HIDDEN_VARIABLES = re.compile(r"WHET_STORE|WHET_STORE_TOKEN|WHET_.*_KEY")
"""Variables of the runner that commands do not inherit: the store's, whose address may have a
password, and keys of other models."""


def build_environment(llm: Endpoint, *, posts_rewards: bool) -> dict[str, str]:
    """Return the variables by which clients in any language find the model and its other URLs.

    The reward key is among them only if the agent `posts_rewards`: a shell that a model uses
    inherits the environment, and could reward itself.
    """
    ids = parse_attempt_ids(llm.base_url)
    rewards = {
        "WHET_REWARD_URL": f"{llm.base_url}/rewards",
        "WHET_REWARD_KEY": llm.reward_key,
    }
    return {
        "OPENAI_BASE_URL": llm.base_url,
        "OPENAI_API_BASE": llm.base_url,
        "OPENAI_API_KEY": llm.api_key,
        "OPENAI_MODEL": llm.model,
        # Clients for Anthropic's API add the version themselves.
        "ANTHROPIC_BASE_URL": llm.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": llm.api_key,
        "ANTHROPIC_AUTH_TOKEN": llm.api_key,
        "ANTHROPIC_MODEL": llm.model,
        # Models that Claude Code asks for in sub-agents and side calls.
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": llm.model for tier in ("HAIKU", "SONNET", "OPUS")},
        "ANTHROPIC_SMALL_FAST_MODEL": llm.model,
        "WHET_MODEL": llm.model,
        "WHET_ROLLOUT_ID": ids.rollout,
        "WHET_ATTEMPT_ID": ids.attempt,
        **(rewards if posts_rewards else {}),
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{llm.base_url}/traces",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization={quote(f'Bearer {llm.api_key}')}",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }


async def fetch_posted_rewards(llm: Endpoint) -> list[Reward]:
    """Return the rewards posted for the attempt so far; empty if its gateway does not list them.

    Raises:
        AgentFailed: the gateway cannot answer, so posted rewards are unknown.
    """
    url = f"{llm.base_url}/rewards"
    try:
        async with HttpClient(token=llm.reward_key) as http:
            reply = await http.request("GET", url, timeout_s=TIMEOUT_S)
        if reply.status >= 500:
            raise TransportError(f"status {reply.status}")
    except TransportError as error:
        raise AgentFailed(
            f"cannot get the posted rewards from {urlsplit(url).netloc}: {error}"
        ) from error
    if reply.status != 200:
        return []
    try:
        return [Reward.model_validate(each) for each in reply.json()["rewards"]]
    except (ValueError, KeyError, TypeError):
        return []


def parse_reward(output: JsonValue) -> float | None:
    """Return the reward in an agent's output: a number, or an object's `reward`; else None.

    Raises:
        BadReward: it is not a finite number.
    """
    value = output.get("reward") if isinstance(output, dict) else output
    if isinstance(value, bool) or not isinstance(value, int | float):
        if isinstance(output, dict) and value is not None:
            raise BadReward(f"a reward is a number; found {value!r:.80}")
        return None
    return check_reward(value)


def get_last_reward(rewards: Sequence[Reward], hint: str) -> float:
    """Return the last posted reward for the whole attempt. Raises BadReward if there is none."""
    for reward in reversed(rewards):
        if reward.is_own:
            return reward.value
    raise BadReward(f"no reward: {hint}")
