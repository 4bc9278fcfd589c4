"""The ASGI application of the Tinker server."""

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from whet.app.tinker_server.auth import Signer, is_authorized
from whet.app.tinker_server.backend import ServedModel
from whet.app.tinker_server.client_sessions import build_session_routes
from whet.app.tinker_server.inference import build_inference_mounts
from whet.app.tinker_server.management import build_management_routes
from whet.app.tinker_server.sampling import build_sampling_routes
from whet.app.tinker_server.schemas import TooLarge
from whet.app.tinker_server.state import ServerState
from whet.app.tinker_server.storage import Storage
from whet.app.tinker_server.training import build_training_routes
from whet.app.tinker_server.unsupported import build_unsupported_routes
from whet.errors import NotFound, RequestError
from whet.gateway.pipeline import Log

ROOT = "/api/v1"
HEALTH = f"{ROOT}/healthz"
FILES = f"{ROOT}/files/"
"""Prefix of paths with signed URLs."""


def build_server(models: Sequence[ServedModel], storage: Storage, log: Log, key: str) -> ASGIApp:
    """Build the application, which requires the key.

    Tinker's API is under `/api/v1`, that of OpenAI under `/oai/api/v1`, that of Anthropic under
    `/anthropic/api`. `log` is for calls of attempts, of which there are none here.
    """
    state = ServerState(models, storage)
    routes = [
        *build_unsupported_routes(),
        *build_session_routes(state),
        *build_training_routes(state),
        *build_sampling_routes(state),
        *build_management_routes(state, Signer(key)),
    ]

    server = Starlette(
        routes=[Mount(ROOT, routes=routes), *build_inference_mounts(state, log)],
        exception_handlers={
            TooLarge: _build_handler(413),
            RequestError: _build_handler(400),
            NotFound: _build_handler(404),
            HTTPException: _refuse_path,
        },
    )

    async def serve_if_authorized(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]  # what is routed; `request.url` may depend on the Host header
        is_open = path == HEALTH or path.startswith(FILES)
        if is_open or is_authorized(Request(scope), key):
            return await server(scope, receive, send)
        refusal = JSONResponse({"detail": "invalid API key: set TINKER_API_KEY"}, 401)
        return await refusal(scope, receive, send)

    return serve_if_authorized


def _build_handler(status: int) -> Callable[[Request, Exception], Response]:
    return lambda request, error: JSONResponse({"detail": str(error)}, status)


def _refuse_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"unknown endpoint {request.method} {request.scope['path']}"
    return JSONResponse({"detail": detail}, error.status_code, error.headers)
