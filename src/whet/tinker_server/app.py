"""The server as an ASGI app."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from whet.errors import NotFound, RequestError
from whet.tinker_server.context import Context
from whet.tinker_server.keys import Signer, allowed
from whet.tinker_server.listing import listing_routes
from whet.tinker_server.records import Records
from whet.tinker_server.refusals import refusing_routes
from whet.tinker_server.requests import TooLarge
from whet.tinker_server.sampling import sampling_routes
from whet.tinker_server.service import service_routes
from whet.tinker_server.training import training_routes
from whet.tinker_server.workshop import Samplers, TrainingRuns

ROOT = "/api/v1"
OPEN = (f"{ROOT}/healthz", f"{ROOT}/files/")
"""What needs no key; files have signed addresses."""


def build_server(runs: TrainingRuns, samplers: Samplers, records: Records, key: str) -> ASGIApp:
    """Everything under `/api/v1`, for whoever has the key."""
    context = Context(runs, samplers, records)
    routes = [
        *refusing_routes(),
        *service_routes(context),
        *training_routes(context),
        *sampling_routes(context),
        *listing_routes(context, Signer(key)),
    ]

    server = Starlette(
        routes=[Mount(ROOT, routes=routes)],
        exception_handlers={
            TooLarge: _answering(413),
            RequestError: _answering(400),
            NotFound: _answering(404),
            HTTPException: _unknown,
        },
    )

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if request.url.path.startswith(OPEN) or allowed(request, key):
            return await server(scope, receive, send)
        refusal = JSONResponse({"detail": "wrong API key: set TINKER_API_KEY"}, 401)
        return await refusal(scope, receive, send)

    return guarded


def _answering(status: int) -> Callable[[Request, Exception], Response]:
    return lambda request, error: JSONResponse({"detail": str(error)}, status)


def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"this server has no {request.method} {request.url.path}"
    return JSONResponse({"detail": detail}, error.status_code, error.headers)
