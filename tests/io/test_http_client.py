"""The HTTP client against a real server: responses, streams, timeouts and broken connections."""

import json
import subprocess
import sys
from collections.abc import AsyncGenerator

import anyio
import pytest
from anyio import to_thread
from anyio.from_thread import start_blocking_portal
from starlette.applications import Starlette
from starlette.requests import Request as ServerRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from whet.io.http_client import HttpClient, TransportError
from whet.io.server import AppServer

pytestmark = pytest.mark.anyio


async def echo(request: ServerRequest) -> Response:
    found = {
        "method": request.method,
        "body": (await request.body()).decode(),
        "token": request.headers.get("authorization"),
        "encoding": request.headers.get("accept-encoding"),
    }
    return JSONResponse(found, status_code=int(request.query_params.get("status", "200")))


async def forever(request: ServerRequest) -> Response:
    async def chunks() -> AsyncGenerator[bytes]:
        yield b"first"
        await anyio.sleep_forever()

    return StreamingResponse(chunks())


@pytest.fixture
async def url() -> AsyncGenerator[str]:
    routes = [Route("/echo", echo, methods=["GET", "POST"]), Route("/forever", forever)]
    server = AppServer(Starlette(routes=routes))
    yield server.url
    await to_thread.run_sync(server.close)


@pytest.fixture
async def http() -> AsyncGenerator[HttpClient]:
    async with HttpClient(token="secret") as client:
        yield client


async def test_a_response_is_whole_whatever_its_status(http: HttpClient, url: str) -> None:
    reply = await http.request("POST", f"{url}/echo?status=418", json={"a": 1})
    assert reply.status == 418
    assert reply.headers["Content-Type"] == "application/json"
    found = reply.json()
    assert json.loads(found.pop("body")) == {"a": 1}
    assert found == {"method": "POST", "token": "Bearer secret", "encoding": "identity"}
    assert (await http.request("POST", f"{url}/echo", body=b"raw")).json()["body"] == "raw"


async def test_a_stream_is_read_as_it_comes_and_may_be_left(http: HttpClient, url: str) -> None:
    with anyio.fail_after(5):
        async with http.stream("GET", f"{url}/forever") as response:
            assert response.status == 200
            assert await response.content.readany() == b"first"


async def test_a_request_that_takes_too_long_is_a_transport_error(
    http: HttpClient, url: str
) -> None:
    with pytest.raises(TransportError, match=r"no response within 0\.2 s"):
        await http.request("GET", f"{url}/forever", timeout_s=0.2)


async def test_a_response_that_is_too_large_is_a_transport_error(
    http: HttpClient, url: str
) -> None:
    with pytest.raises(TransportError, match="larger than 10 bytes"):
        await http.request("GET", f"{url}/echo", max_bytes=10)
    assert (await http.request("GET", f"{url}/echo", max_bytes=1000)).status == 200


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://no.such.host.invalid/", "no url"])
async def test_a_server_that_cannot_be_reached_is_a_transport_error(
    http: HttpClient, url: str
) -> None:
    with pytest.raises(TransportError):
        await http.request("GET", url)


async def test_a_connection_that_breaks_off_is_a_transport_error(http: HttpClient) -> None:
    async def break_off(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, break_off)
        with pytest.raises(TransportError):
            await http.request("GET", f"http://127.0.0.1:{port}/")
        with pytest.raises(TransportError):
            async with http.stream("GET", f"http://127.0.0.1:{port}/") as response:
                await response.read()
        group.cancel_scope.cancel()


async def test_the_proxy_of_the_machine_is_not_asked_for_loopback(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens
    async with HttpClient(trust_env=True) as http:
        assert (await http.request("GET", f"{url}/echo")).status == 200
        with pytest.raises(TransportError, match=r"127\.0\.0\.1:9"):
            await http.request("GET", "http://no.such.host.invalid/")


async def test_one_client_serves_several_event_loops(http: HttpClient, url: str) -> None:
    async def get() -> int:
        return (await http.request("GET", f"{url}/echo")).status

    with start_blocking_portal() as portal:
        assert [await to_thread.run_sync(portal.call, get), await get()] == [200, 200]
        await http.close()
    with pytest.raises(TransportError, match="closed"):
        await get()


def test_importing_it_does_not_import_aiohttp() -> None:
    check = "import sys, whet.io.http_client; raise SystemExit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
