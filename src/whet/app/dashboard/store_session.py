"""Access to the dashboard of a running `whet store`, for commands that have its token."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from whet.app.dashboard.access import CODE_PATH, SESSION_PATH
from whet.errors import ConfigError, StoreError
from whet.io.http_client import HttpClient, Response, TransportError
from whet.store.http.token import find_token

TIMEOUT_S = 10.0


class StoreSession:
    """A client that is signed in to the dashboard of a store, as a browser is by a link."""

    def __init__(self, http: HttpClient, url: str) -> None:
        self._http = http
        self._url = url

    async def get(self, path: str, query: Mapping[str, Any]) -> Any:
        """Return the JSON at a path. Any: as json.loads. Raises StoreError."""
        return (await _send(self._http, "GET", self._url, f"{path}?{urlencode(query)}")).json()


async def request_code(store: str, directory: Path) -> tuple[str, str]:
    """Return the URL of a store and a new code for its dashboard. Raises StoreError."""
    parts = urlsplit(store)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"invalid --store {store!r}: expected a URL, such as http://127.0.0.1:4747"
        )
    url = f"{parts.scheme}://{parts.netloc}"
    async with HttpClient(token=find_token(directory)) as http:
        return url, (await _send(http, "POST", url, CODE_PATH)).json()["code"]


@asynccontextmanager
async def open_session(store: str, directory: Path) -> AsyncGenerator[StoreSession]:
    """Yield a session, for which a code is requested. Raises StoreError."""
    url, code = await request_code(store, directory)
    async with HttpClient() as http:
        opened = await _send(http, "POST", url, SESSION_PATH, {"code": code})
    cookie = opened.headers["Set-Cookie"].partition(";")[0]
    async with HttpClient(headers={"Cookie": cookie}) as http:
        yield StoreSession(http, url)


async def _send(
    http: HttpClient, method: str, url: str, path: str, json: object = None
) -> Response:
    try:
        reply = await http.request(method, url + path, json=json, timeout_s=TIMEOUT_S)
    except TransportError as error:
        raise StoreError(f"cannot reach the store {url}: {error}") from error
    if reply.status >= 400:
        found = reply.body[:200].decode(errors="replace")
        raise StoreError(f"the store {url} refused: {reply.status} {found}")
    return reply
