"""Three hundred attempts at once in one process, each with a marker of its own."""

import re
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import anyio
import httpx
import pytest

import whet
from support.agents.cross_thread import until
from support.agents.run_agents import FixedEndpoint
from whet.config import GatewayConfig, RunnerConfig
from whet.gateway import auth
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.io.server import AppServer
from whet.protocols import Engine
from whet.runners.collector import QueueCollector
from whet.runners.runner import Runner
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Endpoint, Group, Rollout, Sampling, TokenChunk, Trajectory

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
    ) -> AsyncGenerator[TokenChunk]:
        await anyio.sleep(0.01)
        marker = MARKER.findall(self._template.decode(prompt))[-1]
        tokens = tuple(self._template.encode(marker))
        yield TokenChunk(tokens, (-0.5,) * len(tokens), (0,) * len(tokens), stop="stop")

    async def close(self) -> None:
        pass


class Crowd:
    """Waits until all attempts have arrived, so that they run at once."""

    def __init__(self) -> None:
        self._arrived, self._lock = 0, threading.Lock()

    async def gather(self) -> None:
        with self._lock:
            self._arrived += 1
        await until(lambda: self._arrived == AT_ONCE)


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
                message = reply.raise_for_status().json()["choices"][0]["message"]
                assert message["content"] == marker
                whet.emit_message(marker)
                whet.emit_reward(task + 0.25 * turn, turn=turn)
                messages += [message, {"role": "user", "content": f"again {marker}"}]
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
        rendered = template.decode(call.prompt_suffix)
        assert {*MARKER.findall(sampled), *MARKER.findall(rendered)} == {marker}
    assert trajectory.calls[1].parent == trajectory.calls[0].generation_id(0)


@pytest.mark.slow
async def test_tokens_rewards_and_spans_of_300_attempts_at_once_are_their_own(
    tmp_path: Path,
) -> None:
    template = ChatTemplate(Path(whet.__file__).parent / "demos" / "tiny")
    async with SQLiteStore(tmp_path / "store.db") as store:
        pipeline = CallPipeline(
            engine=Echo(template),
            log=store,
            renderer=Renderer(template),
            models=("policy",),
            context_length=4096,
        )
        server = AppServer(build_app(pipeline, SECRET, GatewayConfig()), name="gateway")

        def endpoint(attempt: Attempt) -> Endpoint:
            path = f"/rollout/{attempt.rollout.id}/attempt/{attempt.id}/v1"
            key = auth.mint_key(attempt.id, SECRET)
            return Endpoint(base_url=server.url + path, api_key=key, model="policy")

        runner = Runner(
            agent_in(Crowd()),
            RunnerConfig(concurrency=AT_ONCE),
            store=store,
            endpoints=FixedEndpoint(endpoint),
        )
        rollouts = [
            Rollout(id=f"r{n}", group=f"g{n}", task=n, max_attempts=1) for n in range(AT_ONCE)
        ]
        groups: list[Group] = []
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
