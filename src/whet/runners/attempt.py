"""What an agent outside of this process is told of its attempt, and what it may have posted."""

import http.client
import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from pydantic import JsonValue

from whet.errors import AgentFailed, BadReward
from whet.types import Endpoint, Reward

TIMEOUT_S = 30.0

_IDS = re.compile(r"/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)/")
SECRETS = ("WHET_STORE_TOKEN",)
"""Variables of ours that are no agent's business."""


class Ids(NamedTuple):
    """Of a rollout and the attempt at it."""

    rollout: str
    attempt: str


def ids_of(llm: Endpoint) -> Ids:
    """Whose endpoint it is: the ids are part of its path."""
    found = _IDS.search(llm.base_url)
    return Ids(found["rollout"], found["attempt"]) if found else Ids("", "")


def environment_of(llm: Endpoint) -> dict[str, str]:
    """Variables by which clients in any language find the model, and where to send what else."""
    ids = ids_of(llm)
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
        "WHET_MODEL": llm.model,
        "WHET_ROLLOUT_ID": ids.rollout,
        "WHET_ATTEMPT_ID": ids.attempt,
        "WHET_REWARD_URL": f"{llm.base_url}/rewards",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{llm.base_url}/traces",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization={quote(f'Bearer {llm.api_key}')}",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }


def read_posted(llm: Endpoint) -> list[Reward]:
    """The rewards that were posted for the attempt so far; none if its gateway does not say.

    Raises:
        AgentFailed: the gateway cannot be asked, so nobody knows what was posted.
    """
    url = urlsplit(f"{llm.base_url}/rewards")
    connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = connect(url.hostname or "", url.port, timeout=TIMEOUT_S)
    try:
        headers = {"authorization": f"Bearer {llm.api_key}"}
        connection.request("GET", url.path, headers=headers)
        reply = connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            return []
        return [Reward.model_validate(each) for each in json.loads(body)["rewards"]]
    except (OSError, http.client.HTTPException) as error:
        raise AgentFailed(f"cannot ask {url.netloc} which rewards were posted: {error}") from error
    except (ValueError, KeyError, TypeError):
        return []
    finally:
        connection.close()


def reward_in(said: JsonValue) -> float | None:
    """The reward in what an agent said: a number, or an object's `reward`; None if there is none.

    Raises:
        BadReward: it is no finite number.
    """
    found = said.get("reward") if isinstance(said, dict) else said
    if isinstance(found, bool) or not isinstance(found, int | float):
        if isinstance(said, dict) and found is not None:
            raise BadReward(f"a reward is a number; the agent said {found!r:.80}")
        return None
    if not math.isfinite(found):
        raise BadReward(f"a reward is a finite number; the agent said {found}")
    return float(found)


def last_reward(rewards: Sequence[Reward], hint: str) -> float:
    """What an attempt earned by what was posted: the last for all of it. Raises BadReward."""
    for reward in reversed(rewards):
        if reward.key == "reward" and reward.target is None:
            return reward.value
    raise BadReward(f"no reward: {hint}")
