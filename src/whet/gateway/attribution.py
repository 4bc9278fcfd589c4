"""Whose call it is: by URL path, API key, header and W3C baggage, all at once."""

from typing import NamedTuple
from urllib.parse import unquote

from starlette.requests import Request

from whet.errors import RequestError, WhetError
from whet.gateway import keys
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
    key = _key(request)
    holder = keys.read(key, secret) if key else None
    if holder is None:
        raise Unauthorized(
            "send the attempt's API key (llm.api_key) as `Authorization: Bearer` or `x-api-key`"
        )
    told = {
        AttemptId(name)
        for name in (
            request.path_params.get("attempt"),
            request.headers.get(trace_header),
            _from_baggage(request),
        )
        if name
    }
    if holder != keys.ANY:
        if told - {holder}:
            raise Unauthorized(f"this API key is not of attempt {min(told - {holder})!r}")
        told = {holder}
    if len(told) > 1:
        raise RequestError(f"the request names several attempts: {', '.join(sorted(told))}")
    agent = request.path_params.get("agent") or request.headers.get(AGENT_HEADER, "")
    return Caller(min(told, default=None), agent)


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return bearer or request.headers.get("x-api-key", "")


def _from_baggage(request: Request) -> str | None:
    for member in request.headers.get("baggage", "").split(","):
        name, _, value = member.partition(";")[0].partition("=")
        if name.strip() == BAGGAGE_KEY:
            return unquote(value.strip())
    return None
