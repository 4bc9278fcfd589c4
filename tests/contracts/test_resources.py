"""Resources: what every store promises."""

from typing import Literal

import anyio
import pytest
from pydantic import JsonValue

from support.clock import Clock
from support.store.records import WON, claim, failed, rollout
from whet.errors import NotFound, StoreError
from whet.protocols import Store

pytestmark = pytest.mark.anyio


async def test_resources_have_versions_that_never_change(store: Store, clock: Clock) -> None:
    template: JsonValue = {"text": "solve {task} \x00 \ud83d", "shots": [1, 2.5, None]}
    assert await store.publish("prompt", template) == 1
    clock.now += 1
    assert await store.publish("prompt", "shorter") == 2
    assert await store.publish("llm", None) == 1
    assert (await store.get("prompt", 1)).value == template
    assert await store.latest("prompt") == await store.get("prompt", 2)
    assert (await store.latest("prompt")).created == clock.now
    assert [(r.name, r.version) for r in await store.resources()] == [("llm", 1), ("prompt", 2)]
    for wrong in (0, 3):
        with pytest.raises(NotFound, match=f"no version {wrong} of resource 'prompt'"):
            await store.get("prompt", wrong)
    with pytest.raises(NotFound, match="no resource 'nothing'"):
        await store.latest("nothing")
    with pytest.raises(StoreError, match=r"^invalid name '\.\./etc': expected 1 to 128"):
        await store.publish("../etc", 1)


async def test_published_at_once_versions_are_all_there(store: Store) -> None:
    versions: list[int] = []

    async def publish(n: int) -> None:
        versions.append(await store.publish("prompt", n))

    async with anyio.create_task_group() as group:
        for n in range(10):
            group.start_soon(publish, n)
    assert sorted(versions) == list(range(1, 11))


async def test_an_attempt_gets_the_version_its_rollout_is_pinned_to_or_the_latest_at_its_claim(
    store: Store,
) -> None:
    await store.publish("prompt", "one")
    await store.publish("llm", "small")
    pinned = rollout("a", resources={"prompt": 1, "llm": "latest"})
    await store.enqueue([pinned])
    await store.publish("prompt", "two")
    await store.publish("llm", "large")
    first = await claim(store)
    await store.publish("llm", "larger")
    assert first.resources == {"prompt": 1, "llm": 2}
    assert await store.attempt(first.id) == first
    await store.finish(first.id, failed())
    second = await claim(store)
    assert second.resources == {"prompt": 1, "llm": 3}
    await store.finish(second.id, WON)
    assert [t.attempt for t in await store.trajectories(["a"])] == [second]
    assert [a.resources for a in await store.attempts("a")] == [first.resources, second.resources]


@pytest.mark.parametrize("resources", [{"prompt": 2}, {"nothing": 1}, {"nothing": "latest"}])
async def test_a_rollout_that_asks_for_what_was_never_published_is_refused(
    store: Store, resources: dict[str, int | Literal["latest"]]
) -> None:
    await store.publish("prompt", "one")
    with pytest.raises(NotFound, match="'b' cannot be enqueued"):
        await store.enqueue([rollout("a"), rollout("b", resources=resources)])
    assert await store.rollouts() == []
