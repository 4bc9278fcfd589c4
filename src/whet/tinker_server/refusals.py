"""Endpoints of the hosted service that a server with one key has nothing for."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

ONE_PROJECT = "this server has one project: a checkpoint is used by its own path, wherever it is"
NO_BILLS = "this server bills nobody: list_user_checkpoints says what is kept, and how much"
REASONS = {
    "/copy_weights": ONE_PROJECT,
    "/sessions/{session}/project": ONE_PROJECT,
    "/sessions/{session}/trace_export": "this server keeps no timelines of sessions",
    "/sessions/search": "this server lists sessions, and searches none: use list_sessions",
    "/audit": "this server keeps no audit log: it has one key, and does not know who asks",
    "/billing/usage/events": NO_BILLS,
    "/billing/usage/checkpoints/current": NO_BILLS,
}


def refusing_routes() -> list[Route]:
    """The routes."""
    methods = ["GET", "POST", "PUT", "DELETE"]
    return [Route(path, _saying(reason), methods=methods) for path, reason in REASONS.items()]


def _saying(reason: str) -> Callable[[Request], Response]:
    # Not 501: the client would ask again for minutes.
    return lambda request: JSONResponse({"detail": reason}, 404)
