"""API keys of attempts, and which attempt a request belongs to.

A request identifies its attempt by URL path, API key, header and W3C baggage, in any combination.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from whet.errors import RequestError, WhetError
from whet.io.otlp import ATTEMPT
from whet.types import AttemptId

if TYPE_CHECKING:  # minting keys needs no HTTP framework
    from starlette.requests import Request

AGENT_HEADER = "x-whet-agent"
KEY_PREFIX = "whet-"
MAC_LENGTH = 32

API_KEY = "API key", "llm.api_key", "OPENAI_API_KEY"
REWARD_KEY = "reward key", "llm.reward_key", "WHET_REWARD_KEY"
"""What the keys are called, where an agent finds them, and where a command does."""

REWARDS = "rewards:"
"""Scope of the keys that post rewards; ids of attempts have no colon."""

ANY_ATTEMPT = AttemptId("*")
"""Attempt of the gateway's own key: the URL, a header or baggage then names the real one."""


class Unauthorized(WhetError):
    """The API key is missing, invalid, or of another attempt."""


# ------------------------------------------------------------------- keys


def derive_secret(token: str, run: str) -> bytes:
    """Derive the secret of a run's keys from a store's token, where processes share no more.

    The token cannot be computed from a key.
    """
    key = hashlib.sha256(token.encode()).digest()
    return hashlib.blake2b(run.encode(), key=key, person=b"whet gateway").digest()


def mint_key(attempt: AttemptId, secret: bytes) -> str:
    """Return the API key of an attempt, or with ANY_ATTEMPT of the gateway itself."""
    return f"{KEY_PREFIX}{attempt}-{_compute_mac(attempt, secret)}"


def mint_reward_key(attempt: AttemptId, secret: bytes) -> str:
    """Return the key that posts rewards of an attempt, which its API key cannot."""
    return f"{KEY_PREFIX}{attempt}-{_compute_mac(REWARDS + attempt, secret)}"


def read_key(key: str, secret: bytes, scope: str = "") -> AttemptId | None:
    """Return the attempt of a key, or None if the key was not minted with this secret."""
    body, _, mac = key.removeprefix(KEY_PREFIX).rpartition("-")
    genuine = key.startswith(KEY_PREFIX) and hmac.compare_digest(
        mac.encode(), _compute_mac(scope + body, secret).encode()
    )
    return AttemptId(body) if genuine else None


def _compute_mac(attempt: str, secret: bytes) -> str:
    return hmac.new(secret, attempt.encode(), hashlib.sha256).hexdigest()[:MAC_LENGTH]


# ------------------------------------------------------------------- requests


class Caller(NamedTuple):
    """The attempt and the agent that a request comes from."""

    attempt: AttemptId | None
    agent: str


def identify_caller(
    request: "Request", secret: bytes, trace_header: str, scope: str = ""
) -> Caller:
    """Return the attempt and agent of a request, by a key of the scope.

    Raises:
        Unauthorized: the key is missing, invalid, or of another attempt.
        RequestError: the request names two attempts.
    """
    headers, prefix = request.headers, request.state
    keys = _list_candidate_keys(headers.get("authorization", ""), headers.get("x-api-key", ""))
    keys.append(prefix.key or "")  # of an agent with a key of its own
    holders = {holder for key in keys if key and (holder := read_key(key, secret, scope))}
    if not holders:
        kind, name, variable = REWARD_KEY if scope else API_KEY
        found = "is not one of this endpoint" if any(keys) else "is missing"
        raise Unauthorized(
            f"the {kind} {found}: send {name} (in a command ${variable}) as "
            "`Authorization: Bearer` or `x-api-key`"
        )
    baggage = _read_baggage(headers.getlist("baggage"))
    names = (prefix.attempt, *headers.getlist(trace_header), *baggage)
    named = {AttemptId(name) for name in names if name}
    if len(named) > 1:
        raise RequestError(f"the request names several attempts: {', '.join(sorted(named))}")
    own = holders - {ANY_ATTEMPT}
    if len(own) > 1:
        found = ", ".join(sorted(own))
        raise RequestError(f"the request has API keys of several attempts: {found}")
    if own and named - own:
        raise Unauthorized(f"this API key does not belong to attempt {min(named)!r}")
    agent = prefix.agent or headers.get(AGENT_HEADER, "")
    return Caller(min(named | own, default=None), agent)


def require_attempt(attempt: AttemptId | None) -> AttemptId:
    """Return the attempt of a request that must name one. Raises Unauthorized."""
    if attempt is None:
        raise Unauthorized("the request names no attempt: use the attempt's own URL or key")
    return attempt


def _list_candidate_keys(authorization: str, api_key: str) -> list[str]:
    """Return what may be our key: clients may send another provider's key in the other header."""
    scheme, _, key = authorization.partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return [bearer, api_key.strip()]


def _read_baggage(headers: Sequence[str]) -> list[str]:
    named: list[str] = []
    for member in ",".join(headers).split(","):
        name, _, value = member.partition(";")[0].partition("=")
        if name.strip() == ATTEMPT:
            named.append(unquote(value.strip()))
    return named
