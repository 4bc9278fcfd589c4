"""Endpoints at remote gateways: discovery, health checks, and lost gateways."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.config import RunnerConfig
from whet.io.process import find_free_port
from whet.io.server import AppServer
from whet.runners.endpoints import RemoteEndpoints
from whet.runners.runner import Runner
from whet.store.sqlite import SQLiteStore
from whet.types import (
    GATEWAY_PREFIX,
    Attempt,
    AttemptId,
    Endpoint,
    GatewayAddress,
    Rollout,
    Status,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "store.db") as store:
        yield store


def serve(instance: str, port: int = 0) -> AppServer:
    """A gateway with only a health endpoint."""

    async def health(request: Request) -> Response:
        return JSONResponse({"instance": instance})

    return AppServer(Starlette(routes=[Route("/health", health)]), port=port)


def key(attempt: AttemptId) -> str:
    return f"key of {attempt}"


def endpoint_of(gateways: RemoteEndpoints, id_: str) -> Endpoint:
    rollout = Rollout(id=id_, group="g", task=1)
    connection = gateways.connect(Attempt(id=AttemptId(f"{id_}.1"), rollout=rollout, number=1))
    assert connection is not None
    return connection.endpoint


async def test_attempts_are_spread_over_the_gateways_that_answer(store: SQLiteStore) -> None:
    servers = [serve("a"), serve("b")]
    for number, server in enumerate(servers):
        await store.publish(f"{GATEWAY_PREFIX}{number}", {"url": server.url, "model": "policy"})
    await store.publish(
        f"{GATEWAY_PREFIX}dead", {"url": f"http://127.0.0.1:{find_free_port()}", "model": "m"}
    )
    await store.publish(f"{GATEWAY_PREFIX}left", None)
    gateways = RemoteEndpoints(store, key, key)
    with anyio.fail_after(20):
        await gateways.wait_ready()
    found = [endpoint_of(gateways, f"r{n}") for n in range(20)]
    assert {endpoint.base_url.split("/rollout/")[0] for endpoint in found} == {
        server.url for server in servers
    }
    assert found[3] == endpoint_of(gateways, "r3")
    assert found[3].base_url.endswith("/rollout/r3/attempt/r3.1/v1")
    assert found[3].api_key == "key of r3.1"
    for server in servers:
        server.close()


async def test_a_runner_waits_for_the_gateway_and_reports_it_once(store: SQLiteStore) -> None:
    port, lines = find_free_port(), list[str]()
    url = f"http://127.0.0.1:{port}"
    gateways = RemoteEndpoints(
        store, key, key, addresses=[GatewayAddress(url, "policy")], progress=lines.append
    )
    with anyio.move_on_after(0.5) as waiting:
        await gateways.wait_ready()
    assert waiting.cancelled_caught
    server = serve("a", port)
    with anyio.fail_after(20):
        await gateways.wait_ready()
    server.close()
    assert lines[0] == f"waiting for a gateway to answer: {url}"
    assert len(lines) == 1


@pytest.mark.parametrize("back_at_once", [True, False])
async def test_a_restart_of_the_gateway_burns_no_try(
    store: SQLiteStore, back_at_once: bool
) -> None:
    port = find_free_port()
    servers = [serve("before", port)]
    tries, begun = list[Endpoint](), anyio.Event()

    async def one(task: object, llm: Endpoint) -> float:
        tries.append(llm)
        begun.set()
        if len(tries) == 1:
            await anyio.to_thread.run_sync(servers[0].close)
            if back_at_once:
                servers.append(serve("after", port))
            raise ConnectionError("no answer")
        return 1.0

    await store.publish(f"{GATEWAY_PREFIX}1", {"url": servers[0].url, "model": "policy"})
    gateways = RemoteEndpoints(store, key, key)
    runner = Runner(one, RunnerConfig(), store=store, endpoints=gateways)
    await store.enqueue([Rollout(id="a", group="a", task=1, max_attempts=1)])
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            if not back_at_once:
                await begun.wait()
                await store.ended(AttemptId("a.1"))
                with anyio.move_on_after(0.5):
                    await store.wait(["a"])
                assert len(tries) == 1  # nothing is claimed without a gateway
                servers.append(serve("after", port))
            await store.wait(["a"])
            tg.cancel_scope.cancel()
    servers[-1].close()
    attempts = await store.attempts("a")
    assert {a.failure and a.failure.kind.value for a in attempts[:-1]} == {"model_lost"}
    assert attempts[-1].status is Status.SUCCEEDED


async def test_a_failure_beside_a_healthy_gateway_is_the_agents(
    store: SQLiteStore,
) -> None:
    async def one(task: object, llm: Endpoint) -> float:
        raise KeyError("mine")

    server = serve("a")
    gateways = RemoteEndpoints(store, key, key, addresses=[GatewayAddress(server.url, "policy")])
    runner = Runner(one, RunnerConfig(), store=store, endpoints=gateways)
    await store.enqueue([Rollout(id="a", group="a", task=1, max_attempts=1)])
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tg:
            tg.start_soon(runner.run)
            await store.wait(["a"])
            tg.cancel_scope.cancel()
    server.close()
    assert (await store.failures(["a"]))["a"].startswith("agent: ")
