"""The server as an ASGI app."""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.types import ASGIApp

from whet.errors import NotFound, RequestError
from whet.tinker_server.context import Context
from whet.tinker_server.keys import Signer, allowed
from whet.tinker_server.listing import listing_routes
from whet.tinker_server.records import Records
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
        *service_routes(context),
        *training_routes(context),
        *sampling_routes(context),
        *listing_routes(context, Signer(key)),
    ]

    class Guard(BaseHTTPMiddleware):
        """Turns away who has no key."""

        async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
            if not request.url.path.startswith(OPEN) and not allowed(request, key):
                return JSONResponse({"detail": "wrong API key: set TINKER_API_KEY"}, 401)
            return await call_next(request)

    return Starlette(
        routes=[Mount(ROOT, routes=routes)],
        middleware=[Middleware(Guard)],
        exception_handlers={RequestError: _refused, NotFound: _not_found, 404: _unknown},
    )


def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 400)


def _not_found(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 404)


def _unknown(request: Request, error: Exception) -> Response:
    # Not 501: the client would ask again for minutes.
    return JSONResponse({"detail": f"this server has no {request.url.path}"}, 404)
