"""Requests that a store server refuses: a 4xx with one clear line, never a 5xx or a hang."""

import gzip
import json
import socket
import time
import zipfile
import zlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio import to_thread

from support.clock import Clock
from support.store.served_store import TOKEN, serve
from whet.errors import ConfigError
from whet.store.http.bodies import Limits
from whet.store.http.server import StoreServer
from whet.store.sqlite import SQLiteStore
from whet.types import AttemptId, Call, CallId, Generation, Outcome, Rollout, Sampling

pytestmark = pytest.mark.anyio

LIMITS = Limits(body=100_000, body_s=0.3, archive=200_000, pause_s=0.3)
RUN = "/v1/runs/default"
CLAIM = {"worker": "w", "lease_s": 60, "wait_s": 0}


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncGenerator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "store.db", clock=clock) as store:
        yield store


@pytest.fixture
async def url(store: SQLiteStore) -> AsyncGenerator[str]:
    async with serve(store, LIMITS) as server:
        yield server.url


@pytest.fixture
async def http(url: str) -> AsyncGenerator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=10) as client:
        yield client


def rollout(id_: str) -> dict[str, Any]:
    return Rollout(id=id_, task=1, group="g").model_dump()


def call(attempt: str = "a.1", tokens: tuple[int, ...] = (4, 5)) -> Call:
    return Call(
        id=CallId("c"),
        attempt=AttemptId(attempt),
        parent=None,
        root="root",
        messages=({"role": "user", "content": "x"},),
        prompt_suffix=(1, 2, 3),
        prompt_length=3,
        prompt_digest="digest",
        generations=(
            Generation(
                tokens=tokens,
                logprobs=(-0.5,) * len(tokens),
                versions=(1,) * len(tokens),
                stop="stop",
                sampling=Sampling(),
                message={"role": "assistant"},
            ),
        ),
        created=1.0,
    )


def calls(*calls: Call) -> dict[str, Any]:
    return {"items": [{"call": call.model_dump()} for call in calls]}


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def message(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


async def claim(http: httpx.AsyncClient, id_: str = "a") -> None:
    body = {"rollouts": [rollout(id_)]}
    assert (await http.post(f"{RUN}/rollouts", json=body)).status_code == 204
    claimed = await http.post(f"{RUN}/claims", json=CLAIM)
    assert claimed.json()["id"] == f"{id_}.1"


# ------------------------------------------------------------------ who asks


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"],
)
async def test_nothing_is_answered_without_the_token(url: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with httpx.AsyncClient(base_url=url, headers=headers) as stranger:
        for path in (f"{RUN}/rollouts", f"{RUN}/gateways", "/metrics", "/v1/size"):
            response = await stranger.get(path)
            assert refusal(response) == (401, "unauthorized")
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await stranger.post(f"{RUN}/calls", content=b"x")).status_code == 401
        assert (await stranger.put(f"{RUN}/archive", content=b"x")).status_code == 401
        assert (await stranger.get("/health")).json() == {"status": "ok"}
        assert (await stranger.get("/openapi.json")).status_code == 200


async def test_without_a_token_only_this_machine_is_served(store: SQLiteStore) -> None:
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(ConfigError, match="needs a token"):
            StoreServer(store, token=None, host=host)
    server = StoreServer(store, token=None)
    try:
        async with httpx.AsyncClient(base_url=server.url) as anyone:
            assert (await anyone.get(f"{RUN}/rollouts")).json() == []
    finally:
        await to_thread.run_sync(server.close)


# ------------------------------------------------------------------ where


@pytest.mark.parametrize(
    "path",
    [
        "/v1/runs/../../etc/passwd",
        "/v1/runs/..%2f..%2fetc/rollouts",
        "/v1/runs/%2e%2e/rollouts",
        "/v1/runs/.hidden/rollouts",
        "/v1/runs/a%00b/rollouts",
        "/v1/runs/a%20b/rollouts",
        f"/v1/runs/{'x' * 129}/rollouts",
        f"{RUN}/resources/..%2f..%2fsecret",
        f"{RUN}/resources/x/99999999999999999999",
        f"{RUN}/resources/x/-1",
        f"{RUN}/attempts/%2e%2e",
        f"{RUN}/rollouts/a%2fb/attempts",
        "/",
        "/v2/runs/default/rollouts",
        "//v1/runs/default/rollouts",
    ],
)
async def test_an_invalid_path_parameter_is_not_found(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] in ("not_found", "no_such_path")


async def test_a_service_can_ask_where_the_model_is(http: httpx.AsyncClient) -> None:
    path = f"{RUN}/gateways"
    assert (await http.get(path)).json() == []
    for name, where in (("gateway-a", "http://gpu1:8000"), ("gateway-b", "http://gpu2:8000")):
        value = {"url": where, "model": "policy"}
        await http.post(f"{RUN}/resources/{name}", json={"value": value})
    await http.post(f"{RUN}/resources/prompt", json={"value": {"url": "no"}})
    assert (await http.get(path)).json() == [
        {"url": "http://gpu1:8000", "model": "policy"},
        {"url": "http://gpu2:8000", "model": "policy"},
    ]
    await http.post(f"{RUN}/resources/gateway-a", json={"value": None})
    assert [each["url"] for each in (await http.get(path)).json()] == ["http://gpu2:8000"]
    assert (await http.get("/v1/runs/other/gateways")).json() == []


async def test_a_wrong_method_is_refused_with_the_right_one(http: httpx.AsyncClient) -> None:
    response = await http.get(f"{RUN}/calls")
    assert refusal(response) == (405, "wrong_method")
    assert "POST" in response.headers["allow"]
    for method in ("PATCH", "OPTIONS", "TRACE"):
        assert (await http.request(method, f"{RUN}/rollouts")).status_code == 405


async def test_another_runs_ids_are_not_found(http: httpx.AsyncClient) -> None:
    await claim(http)
    other = "/v1/runs/other"
    assert (await http.get(f"{RUN}/attempts/a.1")).status_code == 200
    for path in ("attempts/a.1", "attempts/a.1/calls", "rollouts/a/attempts", "attempts/a.1/end"):
        assert refusal(await http.get(f"{other}/{path}")) == (404, "not_found")
    wait = {"rollouts": ["a"]}
    assert refusal(await http.post(f"{other}/rollouts/wait", json=wait)) == (404, "not_found")
    assert refusal(await http.post(f"{other}/rollouts/cancel", json={"rollouts": ["a"]})) == (
        404,
        "not_found",
    )
    for path, body in (
        ("heartbeats", {"attempt": "a.1", "lease_s": 1}),
        ("outcomes", {"attempt": "a.1", "outcome": {"reward": 1}}),
        ("rewards", {"attempt": "a.1", "reward": {"value": 1}}),
        ("calls", {"call": call().model_dump()}),
    ):
        batch = {"items": [body]}
        [error] = (await http.post(f"{other}/{path}", json=batch)).json()["errors"]
        assert error["code"] == "not_found"
    assert (await http.get(f"{other}/rollouts")).json() == []


# ------------------------------------------------------------------ what


async def test_a_late_report_is_refused_for_itself(http: httpx.AsyncClient, clock: Clock) -> None:
    await claim(http, "a")
    await claim(http, "b")
    finishes: list[dict[str, Any]] = [
        {"attempt": "a.1", "outcome": {"reward": 1}},
        {"attempt": "b.1", "outcome": {"reward": 0}},
    ]
    done = await http.post(f"{RUN}/outcomes", json={"items": finishes[:1]})
    assert done.json()["errors"] == [None]
    finishes[0]["outcome"] = {"reward": 0.5}
    late, fine = (await http.post(f"{RUN}/outcomes", json={"items": finishes})).json()["errors"]
    assert (late["code"], fine) == ("lease_lost", None)
    assert refusal(await http.get(f"{RUN}/attempts/a.1")) == (409, "lease_lost")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("rollouts", {"rollouts": [{"id": "../x", "task": 1, "group": "g"}]}, "rollouts.0.id"),
        ("rollouts", {"rollouts": [{"id": "x", "task": 1}]}, "rollouts.0.group"),
        ("rollouts", {"rollout": []}, "rollouts"),
        ("rollouts", [1, 2], "the request"),
        ("claims", {}, "worker"),
        ("claims", {**CLAIM, "lease_s": 0}, "lease_s"),
        ("claims", {**CLAIM, "wait_s": -1}, "wait_s"),
        ("claims", {**CLAIM, "worker": "a\nb"}, "worker"),
        ("heartbeats", {"items": [{"attempt": "a.1"}]}, "items.0.lease_s"),
        ("rollouts/wait", {"rollouts": [], "wait_s": 1e9}, "wait_s"),
        ("outcomes", {"items": [{"attempt": "a.1", "outcome": {}}]}, "items.0.outcome"),
        ("steps", {"record": {"step": "x"}}, "record.step"),
        ("prune", {"before": "yesterday"}, "before"),
    ],
)
async def test_a_wrong_field_is_named(
    http: httpx.AsyncClient, path: str, body: Any, field: str
) -> None:
    response = await http.post(f"{RUN}/{path}", json=body)
    assert refusal(response) == (422, "invalid")
    assert field in message(response)


@pytest.mark.parametrize(
    ("query", "field"),
    [("limit=-1", "limit"), ("limit=10001", "limit"), ("status=odd", "status"), ("x=1", "x")],
)
async def test_a_wrong_query_is_named(http: httpx.AsyncClient, query: str, field: str) -> None:
    response = await http.get(f"{RUN}/rollouts?{query}")
    assert refusal(response) == (422, "invalid")
    assert field in message(response)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b'"\\',
        b"[" * 50_000,
        b'{"rollouts":' * 8_000,
        b"9" * 10_000,
    ],
)
async def test_a_body_that_is_not_json_is_malformed(http: httpx.AsyncClient, body: bytes) -> None:
    assert refusal(await http.post(f"{RUN}/rollouts", content=body)) == (400, "malformed")


async def test_numbers_that_no_database_holds_are_refused(http: httpx.AsyncClient) -> None:
    step = {"step": 0, "version": 10**30, "checkpoint": "c", "consumed": [], "metrics": {}}
    response = await http.post(f"{RUN}/steps", json={"record": step})
    assert response.status_code == 409
    assert "int" in message(response)
    assert (await http.get(f"{RUN}/steps")).json() == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stop": "halt"}, "generations.0.stop"),
        ({"tokens": "ab"}, "generations.0.tokens"),
        ({"tokens": [1]}, "1 tokens but 2 logprobs"),
        ({"tokens": [1.5, 2]}, "generations.0.tokens.0"),
        ({"sampling": {"temperature": 1e9}}, "temperature"),
    ],
)
async def test_a_wrong_field_of_a_call_is_named(
    http: httpx.AsyncClient, change: dict[str, Any], field: str
) -> None:
    await claim(http)
    body = json.loads(json.dumps(calls(call())))
    body["items"][0]["call"]["generations"][0].update(change)
    response = await http.post(f"{RUN}/calls", json=body)
    assert refusal(response) == (422, "invalid")
    assert field in message(response)
    assert (await http.get(f"{RUN}/counts")).json()["calls"] == 0


async def test_a_token_that_no_database_holds_is_refused_alone(http: httpx.AsyncClient) -> None:
    await claim(http)
    body = calls(call(), call(tokens=(2**40, 1)))
    fine, refused = (await http.post(f"{RUN}/calls", json=body)).json()["errors"]
    assert fine is None
    assert refused["code"] == "refused"


# ------------------------------------------------------------------ again


async def test_a_request_with_the_same_key_is_done_once(http: httpx.AsyncClient) -> None:
    await claim(http)
    key = {"Idempotency-Key": "one"}
    reward = {"items": [{"attempt": "a.1", "reward": {"value": 1}}] * 2}
    for _ in range(2):
        published = await http.post(f"{RUN}/resources/x", json={"value": 1}, headers=key)
        assert published.json() == 1
        await http.post(f"{RUN}/rewards", json=reward, headers={"Idempotency-Key": "two"})
    assert len((await http.get(f"{RUN}/attempts/a.1/rewards")).json()) == 2
    assert (await http.post(f"{RUN}/resources/x", json={"value": 1})).json() == 2
    wrong = {"Idempotency-Key": "../"}
    response = await http.post(f"{RUN}/resources/x", json={"value": 1}, headers=wrong)
    assert refusal(response) == (400, "malformed")
    assert "Idempotency-Key" in message(response)


async def test_an_outcome_that_came_too_late_is_kept_once_however_often_it_is_sent(
    http: httpx.AsyncClient,
) -> None:
    await claim(http)
    finish = {"items": [{"attempt": "a.1", "outcome": {"reward": 1}}]}
    late = {"items": [{"attempt": "a.1", "outcome": {"reward": 0.5}}]}
    await http.post(f"{RUN}/outcomes", json=finish, headers={"Idempotency-Key": "first"})
    for _ in range(2):  # the reply to the first was lost
        sent = await http.post(f"{RUN}/outcomes", json=late, headers={"Idempotency-Key": "late"})
        assert sent.json()["errors"][0]["code"] == "lease_lost"
    [attempt] = (await http.get(f"{RUN}/rollouts/a/attempts")).json()
    assert len(attempt["late"]) == 1


async def test_a_claim_can_be_given_back_by_its_key(http: httpx.AsyncClient) -> None:
    await http.post(f"{RUN}/rollouts", json={"rollouts": [rollout("a")]})
    key = {"Idempotency-Key": "mine"}
    first = await http.post(f"{RUN}/claims", json=CLAIM, headers=key)
    again = await http.post(f"{RUN}/claims", json=CLAIM, headers=key)
    assert first.json() == again.json()
    assert (await http.delete(f"{RUN}/claims/mine")).status_code == 204
    assert refusal(await http.post(f"{RUN}/claims", json=CLAIM, headers=key)) == (409, "lease_lost")


async def test_a_wait_that_is_not_over_is_not_a_result(http: httpx.AsyncClient) -> None:
    await claim(http)
    wait = {"rollouts": ["a"], "wait_s": 0.1}
    assert (await http.post(f"{RUN}/rollouts/wait", json=wait)).status_code == 202
    assert (await http.get(f"{RUN}/attempts/a.1/end?wait_s=0.1")).status_code == 202
    finish = {"items": [{"attempt": "a.1", "outcome": {"reward": 1}}]}
    await http.post(f"{RUN}/outcomes", json=finish)
    assert (await http.post(f"{RUN}/rollouts/wait", json=wait)).status_code == 204
    assert (await http.get(f"{RUN}/attempts/a.1/end")).json() == "succeeded"


# ------------------------------------------------------------------ how much, and how fast


async def test_a_body_that_is_too_large_is_refused(http: httpx.AsyncClient) -> None:
    assert refusal(await http.post(f"{RUN}/rollouts", content=b"x" * 100_001)) == (413, "too_large")

    async def endless() -> AsyncGenerator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    assert refusal(await http.post(f"{RUN}/rollouts", content=endless())) == (413, "too_large")
    assert (await http.get(f"{RUN}/rollouts")).json() == []


async def test_a_bomb_is_not_unpacked(http: httpx.AsyncClient, url: str) -> None:
    bomb = gzip.compress(b"0" * 50_000_000)
    assert len(bomb) < 100_000
    headers = {"Content-Encoding": "gzip"}
    began = time.monotonic()
    for path in ("rollouts", "calls"):
        response = await http.post(f"{RUN}/{path}", content=bomb, headers=headers)
        assert refusal(response) == (413, "too_large")
    assert time.monotonic() - began < 5


async def test_a_body_that_cannot_be_decompressed_is_refused(http: httpx.AsyncClient) -> None:
    packed = gzip.compress(json.dumps({"rollouts": [rollout("a")]}).encode())
    for wrong in (b"no gzip", packed[:-5], packed + b"more", zlib.compress(b"{}")):
        response = await http.post(
            f"{RUN}/rollouts", content=wrong, headers={"Content-Encoding": "gzip"}
        )
        assert refusal(response) == (400, "malformed")
    for encoding in ("br", "gzip, gzip", "deflate"):
        response = await http.post(
            f"{RUN}/rollouts", content=packed, headers={"Content-Encoding": encoding}
        )
        assert refusal(response) == (415, "wrong_encoding")
    response = await http.post(
        f"{RUN}/rollouts", content=packed, headers={"Content-Encoding": "gzip"}
    )
    assert response.status_code == 204


async def test_large_answers_are_compressed_for_clients_that_accept_it(
    http: httpx.AsyncClient,
) -> None:
    body = {"rollouts": [rollout(f"r{n}") for n in range(50)]}
    await http.post(f"{RUN}/rollouts", json=body)
    packed = await http.get(f"{RUN}/rollouts", headers={"Accept-Encoding": "gzip"})
    plain = await http.get(f"{RUN}/rollouts", headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) * 5 < int(plain.headers["content-length"])
    assert packed.json() == plain.json()


async def test_a_slow_body_is_given_up(url: str) -> None:
    def send_slowly() -> bytes:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                f"POST {RUN}/rollouts HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
                "Content-Length: 1000\r\n\r\n{".encode()
            )
            return connection.recv(4096)

    began = time.monotonic()
    answer = await to_thread.run_sync(send_slowly)
    assert answer.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - began < 5


async def test_an_archive_is_bounded_in_every_way(http: httpx.AsyncClient, tmp_path: Path) -> None:
    path = f"{RUN}/archive"
    large = await http.put(path, content=b"x" * 200_001)
    assert refusal(large) == (413, "too_large")
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("format", "whet-run-1")
        archive.writestr("rollout.jsonl", b"0" * 5_000_000)
    refused = await http.put(path, content=bomb.read_bytes())
    assert refusal(refused) == (413, "too_large")
    junk = await http.put(path, content=b"no archive")
    assert refusal(junk) == (409, "refused")
    assert "/" not in message(junk)
    assert (await http.get("/v1/size")).json() == {}


# ------------------------------------------------------------------ what is counted


async def test_everything_is_counted(http: httpx.AsyncClient, clock: Clock) -> None:
    await claim(http, "a")
    await claim(http, "b")
    await http.post(f"{RUN}/calls", json=calls(call("a.1"), call("b.1")))
    finish = {"items": [{"attempt": "a.1", "outcome": Outcome(reward=1).model_dump()}]}
    await http.post(f"{RUN}/outcomes", json=finish)
    finish["items"][0]["outcome"] = {"reward": 0.5}
    await http.post(f"{RUN}/outcomes", json=finish)
    clock.now += 61
    await http.post(f"{RUN}/claims", json=CLAIM)
    await http.get(f"{RUN}/attempts/nobody.1")
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    lines = response.text.splitlines()
    for line in (
        'whet_store_rollouts{run="default",status="queued"} 0.0',
        'whet_store_rollouts{run="default",status="running"} 1.0',
        'whet_store_rollouts{run="default",status="succeeded"} 1.0',
        'whet_store_workers{run="default"} 1.0',
        "whet_store_claims_total 3.0",
        'whet_store_outcomes_total{status="succeeded"} 1.0',
        "whet_store_late_outcomes_total 1.0",
        "whet_store_expired_leases_total 1.0",
        "whet_store_calls_total 2.0",
        "whet_store_sampled_tokens_total 4.0",
        'whet_store_requests_total{endpoint="attempt",status="404"} 1.0',
        'whet_store_request_seconds_count{endpoint="claim"} 3.0',
        'whet_store_request_seconds_bucket{endpoint="claim",le="+Inf"} 3.0',
        "# TYPE whet_store_request_seconds histogram",
        "# TYPE whet_store_calls_total counter",
    ):
        assert line in lines


async def test_a_store_that_cannot_be_read_is_not_healthy(
    http: httpx.AsyncClient, store: SQLiteStore
) -> None:
    await store.close()
    assert refusal(await http.get("/health")) == (503, "unavailable")
    assert refusal(await http.get(f"{RUN}/rollouts")) == (503, "unavailable")


async def test_many_ask_at_once_over_many_connections(http: httpx.AsyncClient) -> None:
    answers: list[int] = []

    async def ask(n: int) -> None:
        body = {"rollouts": [rollout(f"r{n}")]}
        answers.append((await http.post(f"{RUN}/rollouts", json=body)).status_code)

    async with anyio.create_task_group() as group:
        for n in range(50):
            group.start_soon(ask, n)
    assert answers == [204] * 50
    assert len((await http.get(f"{RUN}/rollouts")).json()) == 50


async def test_a_key_counts_for_one_method_only(http: httpx.AsyncClient) -> None:
    key = {"Idempotency-Key": "same"}
    published = await http.post(f"{RUN}/resources/prompt", json={"value": "x"}, headers=key)
    assert published.json() == 1
    pruned = await http.post(f"{RUN}/prune", json={"before": 0.0}, headers=key)
    assert pruned.json() == 0
