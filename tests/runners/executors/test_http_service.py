"""Agents behind HTTP services: their requests, valid answers, and errors."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import whet
from support.agents.run_agents import get_failure
from whet.errors import AgentFailed, BadReward, ConfigError
from whet.runners.executors.http_service import Service
from whet.store.sqlite import SQLiteStore
from whet.types import Endpoint

pytestmark = pytest.mark.anyio

LLM = Endpoint(
    base_url="http://127.0.0.1:9/rollout/r/attempt/r.1/v1",
    api_key="key",
    model="policy",
    reward_key="reward key",
)
Answer = Callable[[dict[str, Any]], Awaitable[bytes]]


def http(body: object, status: str = "200 OK") -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text


@asynccontextmanager
async def serve(answer: Answer, port: int = 0) -> AsyncGenerator[str]:
    writers: list[asyncio.StreamWriter] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /chat HTTP/1.1\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        writer.write(await answer(json.loads(await reader.readexactly(length))))
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:  # one that is never answered stays open
            writer.close()


@asynccontextmanager
async def serve_no_answer(port: int = 0) -> AsyncGenerator[str]:
    over = anyio.Event()

    async def wait(body: dict[str, Any]) -> bytes:
        await over.wait()
        return b""

    async with serve(wait, port) as url:
        yield url
        over.set()


async def test_the_request_has_the_sample_the_model_and_the_urls() -> None:
    requests: list[dict[str, Any]] = []

    async def answer(body: dict[str, Any]) -> bytes:
        requests.append(body)
        return http({"reward": 0.5, "text": "x"})

    async with serve(answer) as url:
        assert await Service(url, max_turns=3)({"question": "q"}, LLM) == 0.5
        assert await Service(url)("a task", LLM) == 0.5
    first, second = requests
    assert (first["trace_id"], first["max_turns"]) == ("r.1", 3)
    assert first["sample"] == {"question": "q"}
    assert second["sample"] == {"task": "a task"}
    assert first["llm"]["base_url"] == LLM.base_url
    assert first["llm"]["headers"] == {"trace_id": "r.1"}
    assert first["llm"]["reward_url"] == f"{LLM.base_url}/rewards"
    assert first["llm"]["reward_key"] == LLM.reward_key


async def test_the_reward_may_be_computed_in_the_runner() -> None:
    async def answer(body: dict[str, Any]) -> bytes:
        assert not {"reward_url", "reward_key"} & set(body["llm"])
        return http({"text": "four"})

    async def judge(task: Any, answer: Any) -> float:
        return float(answer["text"] == task["answer"])

    async with serve(answer) as url:
        assert await Service(url, reward=judge)({"answer": "four"}, LLM) == 1.0
        assert await Service(url, reward=lambda task, answer: 0.25)({}, LLM) == 0.25


async def test_a_subclass_may_override_chat() -> None:
    class Own(whet.Service):
        async def chat(
            self, trace_id: str, sampling_params: dict[str, Any], max_turns: int, **sample: Any
        ) -> Any:
            assert sample.pop("llm") == LLM
            return {"reward": sample["n"] * max_turns}

    assert await Own(max_turns=4)({"n": 2}, LLM) == 8.0


@pytest.mark.parametrize(
    ("reply", "error", "says"),
    [
        (http({"detail": "boom"}, "500 Error"), AgentFailed, 'answered 500: {"detail": "boom"}'),
        (http(b"<html>"), AgentFailed, "did not answer with JSON: '<html>'"),
        (b"", AgentFailed, "gave no answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", AgentFailed, "gave no answer"),
        (b"nonsense\r\n\r\n", AgentFailed, "gave no answer"),
        (http({"reward": "much"}), BadReward, "a reward is a number"),
        # The gateway is not there: posted rewards are unknown.
        (http({"text": "x"}), AgentFailed, "cannot get the posted rewards from 127.0.0.1:9"),
    ],
)
async def test_every_error_is_the_reason_of_the_failed_attempt(
    reply: bytes, error: type[Exception], says: str
) -> None:
    async def answer(body: dict[str, Any]) -> bytes:
        return reply

    async with serve(answer) as url:
        with pytest.raises(error) as raised:
            await Service(url)({}, LLM)
    assert says in str(raised.value)


async def test_the_password_in_its_url_is_in_no_failure() -> None:
    async def answer(body: dict[str, Any]) -> bytes:
        return http({"detail": "boom"}, "500 Error")

    async with serve(answer) as url:
        with pytest.raises(AgentFailed) as refused:
            await Service(url.replace("//", "//ann:secret@"))({}, LLM)
    with pytest.raises(AgentFailed) as away:
        await Service(url.replace("//", "//ann:secret@"), patience_s=0)({}, LLM)
    with pytest.raises(ConfigError) as invalid:
        Service("ftp://ann:secret@host")
    for raised in (refused, away, invalid):
        assert "://...@" in str(raised.value)
        assert "secret" not in str(raised.value)


async def test_a_task_with_a_key_of_the_request_is_refused_in_one_line() -> None:
    with pytest.raises(AgentFailed, match=r"the task has the key 'llm'.*rename it"):
        await Service("http://127.0.0.1:9")({"llm": "mine"}, LLM)


async def test_a_chunked_answer_is_read() -> None:
    async def answer(body: dict[str, Any]) -> bytes:
        chunks = b'5\r\n{"rew\r\n8\r\nard": 1}\r\n0\r\n\r\n'
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks

    async with serve(answer) as url:
        assert await Service(url)({}, LLM) == 1.0


async def test_a_service_that_is_not_there_yet_is_waited_for_and_that_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def answer(body: dict[str, Any]) -> bytes:
        return http({"reward": 1})

    async with serve(answer) as url:
        port = int(url.rpartition(":")[2])
    rewards: list[float] = []

    async def ask() -> None:
        rewards.append(await Service(url, patience_s=20)({}, LLM))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            while not caplog.messages:  # noqa: ASYNC110 - a log line is no event
                await anyio.sleep(0.05)
            async with serve(answer, port):
                while not rewards:
                    await anyio.wait_all_tasks_blocked()
                    await anyio.sleep(0.05)
    assert caplog.messages == [f"waiting up to 20 s for the service {url}/chat"]
    with pytest.raises(AgentFailed, match="cannot connect to the service"):
        await Service(url, patience_s=0)({}, LLM)


async def test_a_timeout_names_the_service_that_is_away_or_does_not_answer(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        async with serve_no_answer() as url:
            reason = await get_failure(Service(url), store, timeout_s=1)
        assert reason == (
            f"timeout: the attempt ran longer than 1 s: the service '{url}/chat' has not answered"
        )
    async with SQLiteStore(tmp_path / "other.db") as store:
        reason = await get_failure(Service(url), store, timeout_s=1)
        expected = f"timeout: the attempt ran longer than 1 s: cannot connect to the service '{url}"
        assert reason.startswith(expected)


async def test_a_timeout_of_a_service_that_came_late_is_that_of_its_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_no_answer() as url:
        port = int(url.rpartition(":")[2])
    reasons: list[str] = []

    async def run() -> None:
        async with SQLiteStore(tmp_path / "store.db") as store:
            reasons.append(await get_failure(Service(url), store, timeout_s=2))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            while not caplog.messages:  # noqa: ASYNC110 - a log line is no event
                await anyio.sleep(0.05)
            async with serve_no_answer(port):
                while not reasons:  # noqa: ASYNC110 - as above
                    await anyio.sleep(0.05)
    assert reasons[0].endswith(f"ran longer than 2 s: the service '{url}/chat' has not answered")


async def test_requests_are_limited_to_its_concurrency() -> None:
    now, most = 0, 0

    async def answer(body: dict[str, Any]) -> bytes:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await anyio.sleep(0.05)
        now -= 1
        return http({"reward": 1})

    async with serve(answer) as url, anyio.create_task_group() as tasks:
        service = Service(url, concurrency=2)
        for _ in range(6):
            tasks.start_soon(service, {}, LLM)
    assert most == 2


async def test_a_canceled_attempt_hangs_up() -> None:
    left = anyio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while await reader.read(100):
            pass
        left.set()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with anyio.move_on_after(0.2):
        await Service(url)({}, LLM)
    with anyio.fail_after(5):
        await left.wait()
    server.close()


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x", "http://", "agent.py"])
def test_an_invalid_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="a service has a URL"):
        Service(url)
