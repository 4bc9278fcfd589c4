"""Endpoints for sessions, promises and what the server can do."""

import re
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.errors import NotFound, RequestError
from whet.tinker_server import wire
from whet.tinker_server.context import Context, new_id
from whet.tinker_server.records import Session
from whet.tinker_server.requests import ClientConfig, CreateSession, OfRequest, OfSession, read

SPOKEN = "0.36"
"""The client version whose wire this is, and its tests' own."""
OLDEST = (0, 26)
"""Older clients speak in another way."""
LONG_POLL_S = 25.0
"""Shorter than the client waits for an answer."""


def service_routes(context: Context) -> list[Route]:
    """The routes."""
    endpoints = _Service(context)
    return [
        Route("/healthz", endpoints.health),
        Route("/client/config", endpoints.config, methods=["POST"]),
        Route("/client/dynamic_config", _nothing({}), methods=["POST"]),
        Route("/telemetry", _nothing({"status": "accepted"}), methods=["POST"]),
        Route("/get_server_capabilities", endpoints.capabilities),
        Route("/create_session", endpoints.create_session, methods=["POST"]),
        Route("/session_heartbeat", endpoints.heartbeat, methods=["POST"]),
        Route("/sessions/{session}/finish", endpoints.finish, methods=["POST"]),
        Route("/retrieve_future", endpoints.retrieve, methods=["POST"]),
        Route("/cancel_future", endpoints.cancel, methods=["POST"]),
    ]


def _nothing(reply: dict[str, str]) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        return JSONResponse(reply)

    return endpoint


class _Service:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def config(self, request: Request) -> Response:
        body = await read(request, ClientConfig)
        if _version(body.sdk_version) < OLDEST:
            raise RequestError(
                f"this server speaks the wire of tinker {SPOKEN}; found {body.sdk_version}: "
                f"pip install 'tinker=={SPOKEN}.*'"
            )
        return JSONResponse(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": True,
                # HTTP/1.1 on one machine: nothing is gained by another transport.
                "use_pyqwest_transport": False,
            }
        )

    async def capabilities(self, request: Request) -> Response:
        served = self._context.samplers.served
        model = {
            "model_name": served.name,
            "max_context_length": served.context_length,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    async def create_session(self, request: Request) -> Response:
        body = await read(request, CreateSession)
        session = Session(
            id=new_id(),
            created=time.time(),
            metadata=body.user_metadata,
            display_name=body.display_name,
        )
        self._context.begin_session(session)
        return JSONResponse({"type": "create_session", "session_id": session.id})

    async def heartbeat(self, request: Request) -> Response:
        body = await read(request, OfSession)
        if not self._context.beat(body.session_id):
            return JSONResponse({"detail": "the session has ended"}, 410)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        self._context.finish(request.path_params["session"])
        return JSONResponse({})

    async def retrieve(self, request: Request) -> Response:
        id = (await read(request, OfRequest)).request_id
        try:
            reply = await self._context.promises.wait(id, LONG_POLL_S)
        except NotFound as error:
            return JSONResponse({"detail": str(error)}, 410)  # the client asks anew where it can
        if reply is None:
            again = {"type": "try_again", "request_id": id, "queue_state": "active"}
            return JSONResponse(again, 408)
        if isinstance(reply, bytes):
            return Response(reply, media_type=wire.MEDIA_TYPE)
        return JSONResponse(reply)

    async def cancel(self, request: Request) -> Response:
        self._context.promises.cancel((await read(request, OfRequest)).request_id)
        return JSONResponse({})


def _version(text: str) -> tuple[int, ...]:
    numbers = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", text)
    return tuple(map(int, numbers.groups())) if numbers else OLDEST
