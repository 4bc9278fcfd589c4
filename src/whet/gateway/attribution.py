"""Whose call it is: by URL path, API key, header and W3C baggage, all at once."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

from whet.errors import RequestError, WhetError
from whet.gateway import keys
from whet.gateway.asgi import Request
from whet.types import AttemptId

AGENT_HEADER = "x-whet-agent"
BAGGAGE_KEY = "whet.attempt"


class Unauthorized(WhetError):
    """No key, or one we did not mint."""


class Caller(NamedTuple):
    """Who a request says it is from."""

    attempt: AttemptId | None
    agent: str


def read_caller(request: Request, secret: bytes, trace_header: str) -> Caller:
    """The attempt a request belongs to.

    Raises:
        Unauthorized: no key of ours, or the key of another attempt.
        RequestError: the request names two attempts.
    """
    attempt = _whose(
        (request.header("authorization"), request.header("x-api-key")),
        request.params.get("attempt"),
        tuple(request.headers(trace_header)),
        tuple(request.headers("baggage")),
        secret,
    )
    return Caller(attempt, request.params.get("agent") or request.header(AGENT_HEADER))


@lru_cache(1024)
def _whose(
    credentials: tuple[str, str],
    path: str | None,
    traced: tuple[str, ...],
    baggage: tuple[str, ...],
    secret: bytes,
) -> AttemptId | None:
    """The attempt that all of these name; an agent says the same with each of its calls."""
    holders = {holder for key in _keys(*credentials) if (holder := keys.read(key, secret))}
    if not holders:
        raise Unauthorized(
            "send the attempt's API key (llm.api_key) as `Authorization: Bearer` or `x-api-key`"
        )
    told = {AttemptId(name) for name in (path, *traced, *_from_baggage(baggage)) if name}
    if len(told) > 1:
        raise RequestError(f"the request names several attempts: {', '.join(sorted(told))}")
    own = holders - {keys.ANY}
    if len(own) > 1:
        raise RequestError(f"the API keys are of several attempts: {', '.join(sorted(own))}")
    if own and told - own:
        raise Unauthorized(f"this API key is not of attempt {min(told)!r}")
    return min(told | own, default=None)


def require_attempt(attempt: AttemptId | None) -> AttemptId:
    """The attempt, of a request that must name one. Raises Unauthorized."""
    if attempt is None:
        raise Unauthorized("the request names no attempt: use the attempt's own URL or key")
    return attempt


def _keys(authorization: str, api_key: str) -> list[str]:
    """What may be a key of ours: clients for both APIs may send another provider's beside it."""
    scheme, _, key = authorization.partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return [bearer, api_key.strip()]


def _from_baggage(headers: Sequence[str]) -> list[str]:
    named: list[str] = []
    for member in ",".join(headers).split(","):
        name, _, value = member.partition(";")[0].partition("=")
        if name.strip() == BAGGAGE_KEY:
            named.append(unquote(value.strip()))
    return named
