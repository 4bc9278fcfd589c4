"""Endpoints of the hosted service that this server does not support."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

ONE_PROJECT = "this server has one project: checkpoints are addressed by their path alone"
NO_BILLS = "this server has no billing: list_user_checkpoints lists checkpoints and their sizes"
REASONS = {
    "/copy_weights": ONE_PROJECT,
    "/sessions/{session}/project": ONE_PROJECT,
    "/sessions/{session}/trace_export": "this server records no timelines of sessions",
    "/sessions/search": "this server cannot search sessions: use list_sessions",
    "/audit": "this server has no audit log: it has one key and no users",
    "/billing/usage/events": NO_BILLS,
    "/billing/usage/checkpoints/current": NO_BILLS,
}


def build_unsupported_routes() -> list[Route]:
    """Build the routes."""
    methods = ["GET", "POST", "PUT", "DELETE"]
    return [Route(path, _reply(reason), methods=methods) for path, reason in REASONS.items()]


def _reply(reason: str) -> Callable[[Request], Response]:
    # Not 501, which the client retries for minutes.
    return lambda request: JSONResponse({"detail": reason}, 404)
