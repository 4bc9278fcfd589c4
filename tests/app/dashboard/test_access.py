"""Access to a dashboard: one browser for each link, and no page of another site."""

from pathlib import Path

import httpx
import pytest
from starlette.responses import Response

from support.store.served_store import TOKEN
from whet.app.dashboard.access import BrowserSessions, Guard
from whet.app.dashboard.serving import Dashboard, StorePages
from whet.app.run_folder import RunFolder
from whet.store.http.server import StoreServer
from whet.store.sqlite import SQLiteStore


def _code(dashboard: Dashboard) -> str:
    return dashboard.create_link().split("code=")[1]


def test_a_link_opens_one_session_with_a_cookie_that_scripts_and_other_sites_cannot_use(
    dashboard: Dashboard,
) -> None:
    code = _code(dashboard)
    with httpx.Client(base_url=dashboard.url) as first, httpx.Client(base_url=dashboard.url) as two:
        assert first.get("/api/runs").status_code == 401
        opened = first.post("/api/session", json={"code": code})
        cookie = opened.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert first.get("/api/runs").status_code == 200
        assert two.post("/api/session", json={"code": code}).status_code == 403
        assert two.get("/api/runs").status_code == 401


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"code": 5}', b'{"code": "x"}', b"9" * 5000])
def test_an_invalid_code_opens_no_session(dashboard: Dashboard, body: bytes) -> None:
    assert httpx.post(f"{dashboard.url}/api/session", content=body).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.0.0.7", "", "[::1", "a b"])
def test_another_host_is_refused_so_that_no_name_can_be_rebound(
    dashboard: Dashboard, host: str
) -> None:
    with httpx.Client(base_url=dashboard.url) as client:
        for path in ("/", "/app.js", "/api/runs"):
            assert client.get(path, headers={"Host": host}).status_code in (400, 421)


def test_the_names_of_this_machine_and_allowed_ones_are_answered() -> None:
    everywhere = "0.0.0.0"
    guard = Guard(Response(), sessions=BrowserSessions(), host=everywhere, allowed=["P.example"])
    for host in ("localhost:8", "127.0.0.1", "[::1]:5", "p.example", "192.168.7.7:80"):
        assert guard._is_known(host)
    assert not guard._is_known("evil.example")


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_a_request_of_another_site_is_refused_even_with_the_cookie(
    client: httpx.Client, headers: dict[str, str]
) -> None:
    assert client.get("/api/runs", headers=headers).status_code == 403


def test_a_link_on_another_site_may_open_the_page_which_has_no_data(
    client: httpx.Client,
) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/", headers=headers).status_code == 200


def test_nothing_can_be_changed(client: httpx.Client, folder: RunFolder) -> None:
    for path in ("/", "/api/runs", "/api/runs/mine", "/api/runs/mine/rollouts"):
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert client.request(method, path).status_code == 405


def test_every_answer_has_a_strict_policy(client: httpx.Client) -> None:
    for path in ("/", "/app.js", "/api/runs", "/api/runs/none", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("name", ["..", "%2e%2e", "..%2F..%2Fetc", "a/b", "%00", "x" * 300])
def test_a_run_is_a_name_and_never_a_path(client: httpx.Client, name: str) -> None:
    assert client.get(f"/api/runs/{name}").status_code == 404


@pytest.mark.anyio
async def test_a_store_serves_its_dashboard_to_links_that_its_token_gets(tmp_path: Path) -> None:
    async with (
        SQLiteStore(tmp_path / "store.db") as store,
        httpx.AsyncClient() as client,
    ):
        pages = StorePages(store, tmp_path, token=TOKEN, host="127.0.0.1")
        server = StoreServer(store, token=TOKEN, wrap=pages.wrap)
        try:
            url = server.url
            assert (await client.get(f"{url}/health")).status_code == 200
            assert (await client.get(f"{url}/")).headers["content-type"].startswith("text/html")
            assert (await client.post(f"{url}/api/code")).status_code == 401
            bearer = {"Authorization": f"Bearer {TOKEN}"}
            code = (await client.post(f"{url}/api/code", headers=bearer)).json()["code"]
            assert (await client.get(f"{url}/api/runs", headers=bearer)).status_code == 401
            await client.post(f"{url}/api/session", json={"code": code})
            assert (await client.get(f"{url}/api/runs")).json()["runs"] == []
            # The cookie is for the pages alone: the store's own API wants the token.
            assert (await client.get(f"{url}/v1/size")).status_code == 401
        finally:
            pages.close()
            server.close()
