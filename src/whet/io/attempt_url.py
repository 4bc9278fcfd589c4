"""The URL of an attempt at a gateway: `<gateway>/rollout/<id>/attempt/<id>[/agent/<name>]/v1`.

For an agent whose API key cannot be set, `/key/<API key>` stands before it.
"""

import re
from typing import NamedTuple

from whet.types import Attempt

ATTEMPT_PREFIX = re.compile(
    r"(?:/key/(?P<key>[^/]+))?"
    r"(?:/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)(?:/agent/(?P<agent>[^/]+))?)?"
    r"(?:/v1){0,2}(?=/)"
)
"""The beginning of a request's path, before the endpoint; every group is optional. Clients that add
`/v1` to a base URL that has it already are accepted, and so are those that leave it out."""

_URL = re.compile(
    r"https?://[^\s/'\"]+(?:/key/[^\s/]+)?/rollout/[^\s/]+/attempt/[^\s/]+(?P<agent>/agent/[^\s/]+)?/v1"
)

_IDS = re.compile(r"/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)/")


_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\.[0-9]{1,10}")


class AttemptIds(NamedTuple):
    """Ids in the URL of an attempt; empty if the URL names none."""

    rollout: str
    attempt: str


def build_attempt_url(gateway: str, attempt: Attempt) -> str:
    """Return the base URL that an attempt's client uses at a gateway."""
    return f"{gateway}{build_attempt_path(attempt.rollout.id, attempt.id)}/v1"


def build_attempt_path(rollout: str, attempt: str) -> str:
    """Return the part of the URL that names the attempt."""
    return f"/rollout/{rollout}/attempt/{attempt}"


def parse_attempt_ids(url: str) -> AttemptIds:
    """Read the ids back from the base URL of an attempt."""
    found = _IDS.search(url)
    return AttemptIds(found["rollout"], found["attempt"]) if found else AttemptIds("", "")


def shorten_attempt_urls(text: str) -> str:
    """Replace the base URL of an attempt, which differs between attempts, by `llm.base_url`."""
    return _URL.sub(lambda url: f"llm.base_url{url['agent'] or ''}", text)


def is_attempt_id(name: str) -> bool:
    """Whether a name has the form of an attempt's id, and so is safe in paths."""
    return _ATTEMPT.fullmatch(name) is not None
