"""Traces over OTLP/HTTP, as every OpenTelemetry exporter sends them."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from whet.errors import RequestError, StoreError
from whet.io import otlp
from whet.io.otlp import Encoding, Sender
from whet.store.http.bodies import Limits, read_body
from whet.store.http.errors import RefusedRequest, to_http
from whet.store.http.metrics import ServerMetrics
from whet.store.sql_store import SQLStore
from whet.types import AttemptId

PATHS = (
    "/v1/traces",
    "/v1/runs/{run}/v1/traces",
    "/v1/runs/{run}/attempts/{attempt}/v1/traces",
)
"""What stands before `/v1/traces` is an exporter's endpoint: of the default run, of a run, and of
an attempt whose spans need not name it."""

ReadKey = Callable[[str, str], AttemptId | None]
"""Return the attempt that an API key of a run was made for; `*` for a key of the run itself."""

ANY = "*"

MAX_AGENT_BYTES = 20 * 2**20
"""Unpacked bytes of an export that an attempt's key may send, as collectors take by default."""


def read_no_key(key: str, run: str) -> AttemptId | None:
    """Return None, for a store that does not know how keys are made."""
    return None


async def ingest_traces(
    request: Request, store: SQLStore, sender: Sender, limits: Limits, metrics: ServerMetrics
) -> Response:
    """Record the spans of an export; the response counts those that belong to no attempt."""
    try:
        encoding = otlp.parse_encoding(request.headers.get("content-type", ""))
    except RequestError as error:
        content = otlp.build_error(Encoding.JSON, str(error))
        return Response(content, 415, media_type=Encoding.JSON)
    if sender.is_bound:
        limits = limits._replace(body=min(limits.body, MAX_AGENT_BYTES))
    try:
        export = otlp.parse_export(await read_body(request, limits), encoding)
        result = await otlp.ingest(export, sender, store.record, store.owners)
    except (RequestError, StoreError) as error:
        status = 400 if isinstance(error, RequestError) else to_http(error).status
        return Response(otlp.build_error(encoding, str(error)), status, media_type=encoding)
    metrics.count("spans", result.accepted)
    metrics.count("rejected_spans", result.rejected)
    content = otlp.build_response(encoding, result.rejected, result.reason)
    return Response(content, media_type=encoding)


def identify_sender(request: Request, run: str, is_trusted: bool, read_key: ReadKey) -> Sender:
    """Return the sender of spans: the holder of the store's token or of an attempt's key.

    Raises:
        RefusedRequest: the request has neither.
    """
    named = request.path_params.get("attempt")
    if is_trusted:
        return Sender(AttemptId(named) if named else None)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    holder = read_key(key.strip(), run) if scheme.lower() == "bearer" else None
    if holder is None:
        raise RefusedRequest(401, "send the store's token, or the attempt's key, as a bearer token")
    if holder == ANY:
        return Sender(AttemptId(named) if named else None)
    if named not in (None, holder):
        raise RefusedRequest(401, f"this API key does not belong to attempt {named!r}")
    return Sender(holder, is_bound=True)
