"""Three hundred attempts at once in one process, each with a marker of its own."""

import re
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import anyio
import httpx
import pytest
from crossing import until

import whet
from whet.config import GatewayConfig, RunnerConfig
from whet.gateway import keys
from whet.gateway.app import build_app
from whet.gateway.render import Renderer
from whet.gateway.service import Service
from whet.gateway.template import ChatTemplate
from whet.protocols import Engine
from whet.runners.collect import QueueCollector
from whet.runners.gateways import OwnGateway
from whet.runners.local import LocalRunner
from whet.serving import AppServer
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Endpoint, Piece, Rollout, Sampling, Trajectory

pytestmark = pytest.mark.anyio

SECRET = b"0123456789abcdef"
AT_ONCE = 300
MARKER = re.compile(r"m\d{5}x")


class Echo(Engine):
    """Samples the last marker of its prompt."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[Piece]:
        await anyio.sleep(0.01)
        marker = MARKER.findall(self._template.decode(prompt))[-1]
        tokens = tuple(self._template.encode(marker))
        yield Piece(tokens, (-0.5,) * len(tokens), (0,) * len(tokens), stop="stop")

    async def close(self) -> None:
        pass


class Crowd:
    """Waits until all are there, so that they are at work at once."""

    def __init__(self) -> None:
        self._here, self._lock = 0, threading.Lock()

    async def gather(self) -> None:
        with self._lock:
            self._here += 1
        await until(lambda: self._here == AT_ONCE)


def agent_in(crowd: Crowd) -> object:
    async def one(task: int, llm: Endpoint) -> None:
        marker = f"m{task:05d}x"
        await crowd.gather()
        messages = [{"role": "user", "content": f"say {marker}"}]
        async with httpx.AsyncClient(
            base_url=llm.base_url,
            headers={"authorization": f"Bearer {llm.api_key}"},
            timeout=60,
            verify=False,
        ) as client:
            for turn in range(2):
                reply = await client.post(
                    "/chat/completions", json={"model": llm.model, "messages": messages}
                )
                said = reply.raise_for_status().json()["choices"][0]["message"]
                assert said["content"] == marker
                whet.emit_message(marker)
                whet.emit_reward(task + 0.25 * turn, turn=turn)
                messages += [said, {"role": "user", "content": f"again {marker}"}]
        whet.emit_reward(float(task))

    return one


def check(trajectory: Trajectory, template: ChatTemplate) -> None:
    """All there is of an attempt has its own marker and no other."""
    task = trajectory.attempt.rollout.task
    assert isinstance(task, int)
    marker = f"m{task:05d}x"
    assert trajectory.reward == task
    assert [reward.value for reward in trajectory.rewards] == [task, task + 0.25, task]
    assert len(trajectory.calls) == 2
    for call in trajectory.calls:
        sampled = template.decode(call.generations[0].tokens)
        rendered = template.decode(call.context)
        assert {*MARKER.findall(sampled), *MARKER.findall(rendered)} == {marker}
    assert trajectory.calls[1].parent == trajectory.calls[0].generation_id(0)


async def test_tokens_rewards_and_spans_of_300_attempts_at_once_are_their_own(
    tmp_path: Path,
) -> None:
    template = ChatTemplate(Path(whet.__file__).parent / "tiny")
    async with SQLiteStore(tmp_path / "store.db") as store:
        service = Service(
            engine=Echo(template),
            log=store,
            renderer=Renderer(template),
            models=("policy",),
            context_length=4096,
        )
        server = AppServer(build_app(service, SECRET, GatewayConfig()), name="gateway")

        def endpoint(attempt: Attempt) -> Endpoint:
            path = f"/rollout/{attempt.rollout.id}/attempt/{attempt.id}/v1"
            key = keys.mint(attempt.id, SECRET)
            return Endpoint(base_url=server.url + path, api_key=key, model="policy")

        runner = LocalRunner(
            agent_in(Crowd()),
            RunnerConfig(concurrency=AT_ONCE),
            store=store,
            gateways=OwnGateway(endpoint),
        )
        rollouts = [
            Rollout(id=f"r{n}", group=f"g{n}", task=n, max_attempts=1) for n in range(AT_ONCE)
        ]
        with anyio.fail_after(100):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(runner.run)
                groups = await QueueCollector(queue=store, log=store).collect(rollouts)
                tasks.cancel_scope.cancel()
        server.close()
        assert await store.failures([rollout.id for rollout in rollouts]) == {}
        for (trajectory,) in groups:
            check(trajectory, template)
            spans = await store.spans(trajectory.attempt.id)
            marker = f"m{trajectory.attempt.rollout.task:05d}x"
            assert [span.attributes["whet.message"] for span in spans] == [marker] * 2
