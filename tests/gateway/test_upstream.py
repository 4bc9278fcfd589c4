"""Upstream endpoints: text only, their key kept from agents, the rollout's temperature forced."""

import json
import random
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import whet
from whet.app.evaluation.statistics import Scores
from whet.config import GatewayConfig
from whet.errors import ConfigError
from whet.gateway.auth import ANY_ATTEMPT, mint_key
from whet.gateway.upstream import UpstreamRouter
from whet.io.server import AppServer

KEY = "sk-secret"
SECRET = b"secret"
PRIVILEGED = (
    "files",
    "fine_tuning/jobs",
    "organization/admin_api_keys",
    "..%2f..%2fadmin",
    "%2e%2e/admin",
    "x%3Fadmin=1",
    "chat/completions%3Fadmin=1",
)
"""Paths of providers that do more than call a model, and ways out of the configured base."""


@dataclass
class Upstream:
    """A small OpenAI-compatible server."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    other_paths: list[str] = field(default_factory=list[str])

    async def other(self, request: Request) -> Response:
        self.other_paths.append(request.url.path)
        if request.method == "POST":
            self.requests.append(await request.json())
        return JSONResponse({})

    def refuses(self, request: Request) -> bool:
        return request.headers.get("authorization") != f"Bearer {KEY}"

    async def models(self, request: Request) -> Response:
        if self.refuses(request):
            return JSONResponse({"error": {"message": "bad key"}}, 401)
        return JSONResponse({"object": "list", "data": [{"id": "big", "object": "model"}]})

    async def chat(self, request: Request) -> Response:
        assert not self.refuses(request)
        body = await request.json()
        self.requests.append(body)
        question = body["messages"][-1]["content"]
        if question == "overload":
            error = {"error": {"message": "slow down", "type": "rate_limit"}}
            return JSONResponse(error, 429, headers={"retry-after": "0"})
        text = question.upper() if body["temperature"] == 0 else question
        common = {"id": "chatcmpl-1", "created": 0, "model": body["model"]}
        if not body.get("stream"):
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return JSONResponse(common | {"object": "chat.completion", "choices": [choice]})

        async def events():
            for piece in (*text, None):
                if question == "stream break" and piece in ("b", "B"):
                    raise ConnectionResetError
                delta = {"content": piece} if piece else {}
                choice = {"index": 0, "delta": delta, "finish_reason": None if piece else "stop"}
                chunk = common | {"object": "chat.completion.chunk", "choices": [choice]}
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Generator[Upstream]:
    found = Upstream()
    routes = [
        Route("/v1/models", found.models),
        Route("/v1/chat/completions", found.chat, methods=["POST"]),
        Route("/{path:path}", found.other, methods=["GET", "POST", "DELETE"]),
    ]
    server = AppServer(Starlette(routes=routes))
    found.url = f"{server.url}/v1"
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    yield found
    server.close()


async def shout(task: str, llm: whet.Endpoint) -> float:
    assert KEY not in llm.api_key
    messages: Any = [{"role": "user", "content": task}]
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        if task.startswith("stream"):
            text = ""
            async for chunk in await client.chat.completions.create(
                model=llm.model, messages=messages, stream=True, temperature=0.3
            ):
                text += chunk.choices[0].delta.content or ""
        else:
            reply = await client.chat.completions.create(
                model=llm.model, messages=messages, temperature=0.3
            )
            text = reply.choices[0].message.content or ""
    return float(text == task.upper())


def scores_of(agent: Any, task: str, upstream: Upstream, folder: Path) -> Scores:
    """Of the endpoint's model with an agent, greedily, on one task."""
    evaluation = whet.evaluate(
        agent,
        [task],
        ["big"],
        endpoint=upstream.url,
        quiet=True,
        dir=str(folder),
        evaluation={"samples": 0},
        runner={"max_attempts": 1},
    )
    return evaluation.comparison.scores["big"]


def test_an_endpoint_is_evaluated_like_a_model(tmp_path: Path, upstream: Upstream) -> None:
    evaluation = whet.evaluate(
        shout,
        ["one", "stream two", "overload"],
        {"theirs": "big/model"},
        endpoint=upstream.url,
        quiet=True,
        dir=str(tmp_path),
        evaluation={"samples": 2, "temperature": 0.9},
        runner={"max_attempts": 1},
    )

    scores = evaluation.comparison.scores["theirs"]
    assert scores.greedy == (1.0, 1.0, 0.0)
    assert scores.sampled == ((0.0, 0.0),) * 3
    assert {failure.kind for failure in scores.failures} == {"agent"}
    assert "slow down" in scores.failures[0].message
    assert {body["model"] for body in upstream.requests} == {"big/model"}
    assert sorted(body["temperature"] for body in upstream.requests) == [0.0] * 3 + [0.9] * 6


def test_an_unreachable_endpoint_or_a_wrong_key_is_reported_at_start(
    tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(url: str) -> None:
        whet.evaluate(shout, ["a"], ["big"], endpoint=url, quiet=True, dir=str(tmp_path))

    with pytest.raises(ConfigError, match="does not answer"):
        evaluate("http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match=r"found 'api\.example'"):
        evaluate("api.example")
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(ConfigError, match="refuses the key in OPENAI_API_KEY"):
        evaluate(upstream.url)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="without a key; set OPENAI_API_KEY"):
        evaluate(upstream.url)
    assert not list(tmp_path.iterdir())


def test_a_request_that_cannot_be_forwarded_is_refused_with_the_reason(
    tmp_path: Path, upstream: Upstream
) -> None:
    seen: dict[str, int] = {}

    async def rude(task: str, llm: whet.Endpoint) -> float:
        url = llm.base_url + "/chat/completions"
        right = {"authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(verify=False) as client:
            for name, headers, body in (
                ("no key", {}, b"{}"),
                ("no json", right, b"{"),
                ("no object", right, b"[]"),
            ):
                reply = await client.post(url, headers=headers, content=body)
                seen[name] = reply.status_code
                assert reply.json()["error"]["message"]
            reply = await client.post(llm.base_url + "/%00", headers=right, content=b"{}")
            seen["no path"] = reply.status_code
            reply = await client.post(url, headers=right, content=b"[" * 100_000)
            seen["deep json"] = reply.status_code
            nowhere = llm.base_url.replace("/attempt/", "/attempt/x")
            reply = await client.post(nowhere + "/chat/completions", headers=right, content=b"{}")
            seen["other attempt"] = reply.status_code
        return 1.0

    assert scores_of(rude, "a", upstream, tmp_path).greedy == (1.0,)
    assert seen == {
        "no key": 401,
        "no json": 400,
        "no object": 400,
        "no path": 404,
        "deep json": 400,
        "other attempt": 401,
    }


def test_an_attempts_key_reaches_no_other_path_of_the_endpoint(
    tmp_path: Path, upstream: Upstream
) -> None:
    statuses: dict[str, int] = {}

    async def curious(task: str, llm: whet.Endpoint) -> float:
        right = {"authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(verify=False) as client:
            for path in PRIVILEGED:
                for method in ("GET", "POST", "DELETE"):
                    reply = await client.request(
                        method, f"{llm.base_url}/{path}", headers=right, content=b"{}"
                    )
                    statuses[f"{method} {path}"] = reply.status_code
            reply = await client.get(f"{llm.base_url}/models", headers=right)
        return float(reply.json()["data"][0]["id"] == "big")

    assert scores_of(curious, "a", upstream, tmp_path).greedy == (1.0,)
    assert statuses == dict.fromkeys(statuses, 404)
    assert not upstream.other_paths


def test_sampling_is_forced_on_no_request_that_samples_nothing(
    tmp_path: Path, upstream: Upstream
) -> None:
    async def count(task: str, llm: whet.Endpoint) -> float:
        right = {"authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(verify=False) as client:
            for path in ("messages/count_tokens", "embeddings"):
                url = f"{llm.base_url}/{path}"
                await client.post(url, headers=right, json={"model": llm.model, "input": "a"})
        return 1.0

    assert scores_of(count, "a", upstream, tmp_path).greedy == (1.0,)
    assert upstream.requests == [{"model": "big", "input": "a"}] * 2


def test_posted_rewards_do_not_reach_the_endpoint(tmp_path: Path, upstream: Upstream) -> None:
    posts = """
import os, urllib.request

urllib.request.urlopen(urllib.request.Request(
    os.environ["WHET_REWARD_URL"],
    headers={"Authorization": "Bearer " + os.environ["WHET_REWARD_KEY"]},
    data=b'{"value": 0.25}',
))
"""
    agent = whet.command([sys.executable, "-c", posts], reward="post")
    assert scores_of(agent, "a", upstream, tmp_path).greedy == (0.25,)
    assert not upstream.requests


def test_an_endpoint_that_breaks_off_is_seen_by_the_agent(
    tmp_path: Path, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    [failure] = scores_of(shout, "stream break", upstream, tmp_path).failures
    assert "APIConnectionError" in failure.message
    assert "endpoint disconnected in the middle of a response" in caplog.text


def test_an_upstream_model_is_called_by_name_and_never_trained(
    tmp_path: Path, upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    async def with_partner(task: str, llm: whet.Endpoint) -> float:
        async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            messages: Any = [{"role": "user", "content": task}]
            reply = await client.chat.completions.create(
                model="judge", messages=messages, temperature=0
            )
            mine = await client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=4
            )
        assert reply.choices[0].message.content == task.upper()
        return random.random() + len(mine.choices)

    result = whet.train(
        with_partner,
        ["one", "two"],
        dir=str(tmp_path),
        steps=1,
        tasks_per_step=2,
        group_size=4,
        gateway={"endpoints": [f"judge=big/model@{upstream.url}"]},
        runner={"temperature": 1.0},
    )
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "calls to 'judge' go to" in printed
    assert "they are never trained" in printed
    assert result.total("failed_rollouts") == 0
    assert result.total("calls") == len(upstream.requests) == 8, "only the model's own are calls"
    assert {body["temperature"] for body in upstream.requests} == {0}


def test_an_endpoint_is_named_as_it_should_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of the form NAME=MODEL@URL; found 'judge=big'"):
        whet.train(shout, ["a"], dir=str(tmp_path), gateway={"endpoints": ["judge=big"]})


async def post_endless_body(key: str) -> list[Any]:
    """Messages of the reply to a model call whose body does not end."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def endless() -> Any:
        return {"type": "http.request", "body": b" " * 2**22, "more_body": True}

    async def keep(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {key}".encode())],
    }
    await UpstreamRouter(app, {}, SECRET, GatewayConfig())(scope, endless, keep)
    return sent


@pytest.mark.anyio
async def test_a_body_too_large_for_the_gateway_is_refused_by_the_proxy_too() -> None:
    sent = await post_endless_body(mint_key(ANY_ATTEMPT, SECRET))
    assert sent[0]["status"] == 413
    assert "larger than" in json.loads(sent[1]["body"])["error"]["message"]


@pytest.mark.anyio
async def test_the_body_of_a_call_with_a_wrong_key_is_not_read() -> None:
    assert [message["status"] for message in await post_endless_body("whet-no.1-key")] == [401]
