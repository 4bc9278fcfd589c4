"""The engine in another process: what the contract does not cover."""

import socket
from collections.abc import AsyncGenerator, Sequence

import anyio
import anyio.lowlevel
import pytest

from whet.engines.socket_engine import EngineServer, SocketEngine
from whet.protocols import Engine
from whet.types import Attempt, AttemptId, Rollout, Sampling, TokenChunk

pytestmark = pytest.mark.anyio


class SlowEngine(Engine):
    """Gives the second half of its tokens only when the first was read."""

    def __init__(self) -> None:
        self.was_read = anyio.Event()

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False, affinity: str = ""
    ) -> AsyncGenerator[TokenChunk]:
        yield TokenChunk((1, 2), (-0.5, -0.5), (0, 0))
        while not self.was_read.is_set():
            await anyio.lowlevel.checkpoint()
        yield TokenChunk((3,), (-0.5,), (0,), stop="stop")

    async def close(self) -> None:
        pass


async def test_tokens_arrive_while_others_are_still_sampled() -> None:
    mine, other = socket.socketpair()
    inner = SlowEngine()
    server = EngineServer(inner)
    await server.add(mine)
    engine = SocketEngine(other)
    chunks: list[TokenChunk] = []
    with anyio.fail_after(10):
        async for chunk in engine.generate([1], Sampling(), stream=True):
            chunks.append(chunk)
            inner.was_read.set()
    assert [chunk.tokens for chunk in chunks] == [(1, 2), (3,)]
    await engine.close()
    await server.close()


async def test_an_attempt_whose_task_has_a_lone_surrogate_is_prepared() -> None:
    rollout = Rollout(id="a", task={"question": "a\udcff"}, group="a")
    attempt = Attempt(id=AttemptId("a.1"), rollout=rollout, number=1)
    prepared: list[Attempt] = []

    async def prepare(attempt: Attempt) -> None:
        prepared.append(attempt)

    mine, other = socket.socketpair()
    server = EngineServer(SlowEngine(), prepare)
    await server.add(mine)
    engine = SocketEngine(other)
    with anyio.fail_after(10):
        await engine.prepare(attempt)
    assert prepared == [attempt]
    await engine.close()
    await server.close()
