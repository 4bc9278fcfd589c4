"""Access to the dashboard of a running `whet store`, for commands that have its token."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from whet.app.dashboard.access import CODE_PATH, SESSION_PATH
from whet.errors import ConfigError, StoreError
from whet.store.http.token import find_token

TIMEOUT_S = 10.0


def request_code(store: str, directory: Path) -> tuple[str, str]:
    """Return the URL of a store and a new code for its dashboard. Raises StoreError."""
    parts = urlsplit(store)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"invalid --store {store!r}: expected a URL, such as http://127.0.0.1:4747"
        )
    url = f"{parts.scheme}://{parts.netloc}"
    headers = {"Authorization": f"Bearer {find_token(directory)}"}
    try:
        reply = httpx.post(f"{url}{CODE_PATH}", headers=headers, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        raise StoreError(f"cannot reach the store {url}: {error}") from error
    if reply.is_error:
        raise StoreError(f"the store {url} refused: {reply.status_code} {reply.text[:200]}")
    return url, json.loads(reply.content)["code"]


@contextmanager
def open_session(store: str, directory: Path) -> Generator[httpx.Client]:
    """Yield a client that is signed in, as a browser is by a link. Raises StoreError."""
    url, code = request_code(store, directory)
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as session:
        try:
            session.post(SESSION_PATH, json={"code": code}).raise_for_status()
        except httpx.HTTPError as error:
            raise StoreError(f"the store {url} opened no session: {error}") from error
        yield session
