"""Endpoints for sessions, futures and server capabilities."""

import re
import time
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.app.tinker_server import codec
from whet.app.tinker_server.schemas import (
    ClientConfig,
    CreateSession,
    FutureRequest,
    SessionRequest,
    read_json,
)
from whet.app.tinker_server.state import ServerState, create_id
from whet.app.tinker_server.storage import Session
from whet.errors import NotFound, RequestError

CLIENT_VERSION = "0.36"
"""The client version whose protocol this server implements and is tested with."""
OLDEST_CLIENT = (0, 26)
"""Older clients use another protocol."""
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
"""Without it clients keep quiet about samples that they cancel or give up."""
LONG_POLL_S = 25.0
"""Shorter than the client's request timeout."""


def build_session_routes(state: ServerState) -> list[Route]:
    """Build the routes."""
    endpoints = _Sessions(state)
    return [
        Route("/healthz", endpoints.health),
        Route("/client/config", endpoints.config, methods=["POST"]),
        Route("/client/dynamic_config", _reply_always(DYNAMIC_CONFIG), methods=["POST"]),
        Route("/telemetry", _reply_always({"status": "accepted"}), methods=["POST"]),
        Route("/get_server_capabilities", endpoints.capabilities),
        Route("/create_session", endpoints.create_session, methods=["POST"]),
        Route("/session_heartbeat", endpoints.heartbeat, methods=["POST"]),
        Route("/sessions/{session}/finish", endpoints.finish, methods=["POST"]),
        Route("/retrieve_future", endpoints.retrieve, methods=["POST"]),
        Route("/cancel_future", endpoints.cancel, methods=["POST"]),
    ]


def _reply_always(reply: Mapping[str, str | bool]) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        return JSONResponse({**reply})

    return endpoint


class _Sessions:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def config(self, request: Request) -> Response:
        body = await read_json(request, ClientConfig)
        if _parse_version(body.sdk_version) < OLDEST_CLIENT:
            raise RequestError(
                f"this server supports tinker {CLIENT_VERSION}; found {body.sdk_version}: "
                f"pip install 'tinker=={CLIENT_VERSION}.*'"
            )
        return JSONResponse(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": True,
                # HTTP/1.1 on one machine: another transport gains nothing.
                "use_pyqwest_transport": False,
            }
        )

    async def capabilities(self, request: Request) -> Response:
        models = [
            {
                "model_name": name,
                "max_context_length": model.samplers.served.context_length,
                "trainable": True,
                "sampleable": True,
            }
            for model in self._state.models
            for name in model.samplers.served.listed
        ]
        return JSONResponse({"supported_models": models})

    async def create_session(self, request: Request) -> Response:
        body = await read_json(request, CreateSession)
        session = Session(
            id=create_id(),
            created=time.time(),
            metadata=body.user_metadata,
            display_name=body.display_name,
        )
        self._state.begin_session(session)
        return JSONResponse({"type": "create_session", "session_id": session.id})

    async def heartbeat(self, request: Request) -> Response:
        body = await read_json(request, SessionRequest)
        self._state.drop_inactive()
        if not self._state.touch(body.session_id):
            return JSONResponse({"detail": "the session has ended"}, 410)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        self._state.finish(request.path_params["session"])
        return JSONResponse({})

    async def retrieve(self, request: Request) -> Response:
        id = (await read_json(request, FutureRequest)).request_id
        try:
            reply = await self._state.futures.wait(id, LONG_POLL_S)
        except NotFound as error:
            return JSONResponse(
                {"detail": str(error)}, 410
            )  # 410: the client submits the request again where it can
        if reply is None:
            again = {"type": "try_again", "request_id": id, "queue_state": "active"}
            return JSONResponse(again, 408)
        if isinstance(reply, bytes):
            return Response(reply, media_type=codec.MEDIA_TYPE)
        return JSONResponse(reply)

    async def cancel(self, request: Request) -> Response:
        self._state.futures.cancel((await read_json(request, FutureRequest)).request_id)
        return JSONResponse({})


def _parse_version(text: str) -> tuple[int, ...]:
    numbers = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", text)
    return tuple(map(int, numbers.groups())) if numbers else OLDEST_CLIENT
