"""Traces over OTLP/HTTP, as every exporter of OpenTelemetry sends them."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from whet.errors import RequestError, StoreError
from whet.otlp.export import Encoding, answer, encoding_of, read_export, refusal
from whet.otlp.taking import Sender, take
from whet.store.http import bodies
from whet.store.http.bodies import Limits
from whet.store.http.metrics import Metrics
from whet.store.http.problems import Unauthorized, tell
from whet.store.sql import SQLStore
from whet.types import AttemptId

PATHS = (
    "/v1/traces",
    "/v1/runs/{run}/v1/traces",
    "/v1/runs/{run}/attempts/{attempt}/v1/traces",
)
"""The base of each is an exporter's endpoint, which adds the rest itself: of the default run, of a
run, and of an attempt whose spans need not say whose they are."""

ReadKey = Callable[[str, str], AttemptId | None]
"""The attempt of a run that an API key was made for; `*` for a key of the run itself."""

ANY = "*"


def no_keys(key: str, run: str) -> AttemptId | None:
    """For a store that does not know how keys are made."""
    return None


async def take_traces(
    request: Request, store: SQLStore, sender: Sender, limits: Limits, metrics: Metrics
) -> Response:
    """Keep the spans of an export; those that belong nowhere are counted in the answer."""
    try:
        encoding = encoding_of(request.headers.get("content-type", ""))
    except RequestError as error:
        return Response(refusal(Encoding.JSON, str(error)), 415, media_type=Encoding.JSON)
    try:
        export = read_export(await bodies.read_body(request, limits), encoding)
        taken = await take(export, sender, store.record, store.owners)
    except RequestError as error:
        return _refused(400, encoding, str(error))
    except StoreError as error:
        return _refused(tell(error).status, encoding, str(error))
    metrics.count("spans", taken.kept)
    metrics.count("rejected_spans", taken.rejected)
    return Response(answer(encoding, taken.rejected, taken.why), media_type=encoding)


def sender_of(request: Request, run: str, *, is_trusted: bool, read_key: ReadKey) -> Sender:
    """Who sends spans: someone with the store's token, or an attempt with its own key.

    Raises:
        Unauthorized: neither.
    """
    named = request.path_params.get("attempt")
    if is_trusted:
        return Sender(AttemptId(named) if named else None)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    holder = read_key(key.strip(), run) if scheme.lower() == "bearer" else None
    if holder is None:
        raise Unauthorized("send the store's token, or the attempt's key, as a bearer token")
    if holder == ANY:
        return Sender(AttemptId(named) if named else None)
    if named not in (None, holder):
        raise Unauthorized(f"this key is not of attempt {named!r}")
    return Sender(holder, is_bound=True)


def _refused(status: int, encoding: Encoding, why: str) -> Response:
    return Response(refusal(encoding, why), status, media_type=encoding)
