"""Access to the dashboard: one-time codes, cookies, and the requests that are refused.

A browser sends requests to this machine for every page it shows, so a listening port on loopback is
not private. Requests with a foreign `Host` (DNS rebinding), a foreign `Origin` or from another site
are refused, and every answer with data needs the cookie of a session.
"""

import hashlib
import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CODE_S = 12 * 3600.0
"""Seconds for which a code that was not used stays valid."""
SESSION_S = 12 * 3600
MAX_SESSIONS = 256

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
SESSION_PATH = "/api/session"
CODE_PATH = "/api/code"
CHANGES = frozenset({SESSION_PATH, CODE_PATH})
"""The only paths that take POST requests; everything else is read-only."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class BrowserSessions:
    """One-time codes and the sessions they open; kept in memory as digests."""

    def __init__(self, token: str | None = None) -> None:
        """With a `token`, requests that carry it get new codes."""
        self._token = _digest(token) if token else None
        self._codes: dict[bytes, float] = {}
        self._sessions: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def issue_code(self) -> str:
        """Make a code that opens one session."""
        code = secrets.token_urlsafe(16)
        with self._lock:
            self._codes[_digest(code)] = time.monotonic() + CODE_S
        return code

    def open(self, code: str) -> str | None:
        """Exchange a code for the value of a cookie; None if it is unknown, used or too old."""
        now = time.monotonic()
        with self._lock:
            if self._codes.pop(_digest(code), 0.0) < now:
                return None
            self._sessions = {s: end for s, end in self._sessions.items() if end > now}
            while len(self._sessions) >= MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            value = secrets.token_urlsafe(32)
            self._sessions[_digest(value)] = now + SESSION_S
        return value

    def is_open(self, value: str) -> bool:
        """Whether a cookie's value belongs to a session."""
        with self._lock:
            return self._sessions.get(_digest(value), 0.0) > time.monotonic()

    def has_token(self, authorization: str) -> bool:
        """Whether an `Authorization` header carries the token."""
        scheme, _, token = authorization.partition(" ")
        if self._token is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(_digest(token.strip()), self._token)


class Guard:
    """Middleware that refuses foreign requests and adds the security headers."""

    def __init__(
        self, app: ASGIApp, *, sessions: BrowserSessions, host: str, allowed: Sequence[str] = ()
    ) -> None:
        """`host` is the address the server listens on, `allowed` are further host names."""
        self._app = app
        self._sessions = sessions
        self._hosts = LOOPBACK | {name.lower() for name in allowed}
        self._any_address = host in ("0.0.0.0", "::")
        if self._any_address:
            self._hosts |= {socket.gethostname().lower()}
        else:
            self._hosts |= {host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refuse(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> Response | None:
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        host = headers.get("host", "")
        if not self._is_known(host):
            return refuse(
                421, f"unknown host {host[:100]!r}: expected localhost, or name it by --allow-host"
            )
        is_shell = not path.startswith("/api/")
        site = headers.get("sec-fetch-site", "none")
        navigates = is_shell and headers.get("sec-fetch-mode") == "navigate"
        if site not in ("same-origin", "none") and not navigates:
            return refuse(403, "requests from other sites are refused")
        if (origin := headers.get("origin")) is not None and origin.partition("://")[2] != host:
            return refuse(403, f"the origin {origin[:100]!r} is refused")
        if method not in (("POST",) if path in CHANGES else ("GET", "HEAD")):
            return refuse(405, f"{method} is not allowed: the dashboard only reads")
        if is_shell or path in CHANGES or self._has_session(scope):
            return None
        return refuse(401, "no session: open the link that the command printed, or `whet view`")

    def _has_session(self, scope: Scope) -> bool:
        value = HTTPConnection(scope).cookies.get(get_cookie_name(scope), "")
        return self._sessions.is_open(value)

    def _is_known(self, host: str) -> bool:
        name = _parse_host(host)
        if name in self._hosts:
            return True
        # An address cannot be rebound to another one, as a name can.
        return self._any_address and _is_address(name)


def get_cookie_name(scope: Scope) -> str:
    """Name of the cookie: ports of a host share their cookies."""
    server = scope.get("server") or ("", 0)
    return f"whet_{server[1]}"


def refuse(status: int, message: str) -> JSONResponse:
    """Build the response for a request that is refused."""
    return JSONResponse({"error": message}, status_code=status)


def _parse_host(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
