"""A running dashboard: its server, and the links that open it."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from whet.app.dashboard.access import BrowserSessions
from whet.app.dashboard.app import FILES, DashboardApp
from whet.app.dashboard.run_catalog import Catalog, FolderCatalog, StoreCatalog
from whet.io.server import AppServer
from whet.io.threads import run_async
from whet.store.sql_store import SQLStore


class Dashboard:
    """A dashboard that listens at `url` once constructed."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed: Sequence[str] = (),
    ) -> None:
        """Port 0 chooses a free one. Raises ConfigError if it cannot listen there."""
        self._catalog = catalog
        self._sessions = BrowserSessions()
        self._app = DashboardApp(catalog, self._sessions)
        app = self._app.build(host=host, allowed=allowed)
        self._server = AppServer(app, host=host, port=port, name="dashboard")
        self.url = self._server.url

    def create_link(self, run: str | None = None) -> str:
        """Return a link that opens the dashboard once, at a run or the list of runs."""
        return make_link(self.url, self._sessions.issue_code(), run)

    def close(self) -> None:
        """End the streams, finish the requests in progress, then stop. Idempotent."""
        self._app.closing.set()
        self._server.close()
        run_async(self._catalog.close)


def make_link(url: str, code: str, run: str | None = None) -> str:
    """Return the link with a code; as a fragment it reaches no log and no other server."""
    path = f"/r/{quote(run)}" if run else "/"
    return f"{url}/#{path}?code={code}"


class StorePages:
    """The dashboard of a store, at the same address as its HTTP API."""

    def __init__(self, store: SQLStore, directory: Path, *, token: str, host: str) -> None:
        """Serve the runs of a store; the `token` gets new links by `whet view --store`."""
        self._sessions = BrowserSessions(token)
        self._app = DashboardApp(StoreCatalog(store, directory), self._sessions)
        self._pages = self._app.build(host=host)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return an application with the dashboard's paths, and those of `app` beside them."""

        async def choose(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            is_page = path == "/" or path.startswith("/api/") or path[1:] in FILES
            await (self._pages if is_page else app)(scope, receive, send)

        return choose

    def create_link(self, url: str) -> str:
        """Return a link that opens the dashboard once."""
        return make_link(url, self._sessions.issue_code())

    def close(self) -> None:
        """End the streams."""
        self._app.closing.set()


@contextmanager
def serve_beside(directory: Path, *, host: str, port: int) -> Generator[Dashboard]:
    """Serve the runs of a directory while the block runs."""
    dashboard = Dashboard(FolderCatalog(directory), host=host, port=port)
    try:
        yield dashboard
    finally:
        dashboard.close()
