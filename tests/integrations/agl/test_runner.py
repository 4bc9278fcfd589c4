"""Runners of Agent Lightning's stores."""

from typing import Any

import anyio
import pytest

import whet.agl as agl
from whet.errors import StoreError


def test_heartbeats_go_on_after_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    class FlakyStore(agl.InMemoryLightningStore):
        """A store that cannot be reached at first."""

        is_reachable = False

        async def update_worker(self, *args: Any, **options: Any) -> agl.Worker:
            if not self.is_reachable:
                self.is_reachable = True
                raise StoreError("no store")
            heard.set()
            return await super().update_worker(*args, **options)

    heard = anyio.Event()

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> None:
        await heard.wait()

    async def run() -> list[str]:
        store = FlakyStore()
        runner = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=1, heartbeat_interval=0.01)
        await store.add_resources({"llm": agl.LLM(endpoint="http://h/v1", model="m")})
        await store.enqueue_rollout("task")
        with runner.run_context(agent=agent, store=store), anyio.fail_after(30):
            await runner.iter()
        return [rollout.status for rollout in await store.query_rollouts()]

    assert anyio.run(run) == ["succeeded"]
    assert "a heartbeat failed" in caplog.text
