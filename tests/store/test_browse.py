"""The queries of the dashboard, on both databases."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from support.servers.postgres_server import own_schema
from support.store.records import claim, failed, full_call
from whet.errors import NotFound
from whet.store.postgres import PostgresStore
from whet.store.queries import browse, rollout_pages
from whet.store.queries.rollout_pages import Order, PageCursor, RolloutFilter
from whet.store.sql_store import SQLStore
from whet.store.sqlite import SQLiteStore
from whet.types import Mode, Outcome, Reward, Rollout, StepRecord

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[SQLStore]:
    if request.param == "sqlite":
        async with SQLiteStore(tmp_path / "store.db") as opened:
            yield opened
        return
    url = request.getfixturevalue("postgres_url")
    with own_schema(url) as schema:
        async with PostgresStore(url, schema=schema) as opened:
            yield opened


async def _fill(store: SQLStore) -> None:
    """Three rollouts that ended, with a call each, one of which failed; and an evaluation."""
    names = ("a", "b", "c")
    await store.enqueue(
        [Rollout(id=n, group="g", task=f'Say "{n}"', max_attempts=1) for n in names]
    )
    for reward in (0.5, 1.0, None):
        attempt = await claim(store, "w")
        await store.append(full_call(attempt.id))
        await store.emit(attempt.id, Reward(value=2.0, key="k"))
        await store.finish(attempt.id, failed() if reward is None else Outcome(reward=reward))
    await store.enqueue(
        [Rollout(id="before-greedy-00000", group="e", task="t", mode=Mode.VAL, max_attempts=1)]
    )
    await store.publish("prompt", {"x": 1})
    await store.publish("prompt", {"x": 2})
    record = StepRecord(
        step=0, version=1, checkpoint="s", consumed=("a", "b", "c"), metrics={"reward": 0.75}
    )
    await store.commit(record)


async def _ids(store: SQLStore, where: RolloutFilter, order: Order = "newest") -> list[str]:
    page = await store.browse(rollout_pages.read_page, where, order=order)
    assert page.next is None
    return [row.id for row in page.rows]


async def _count(store: SQLStore, where: RolloutFilter, order: Order = "newest") -> int | None:
    return await store.browse(rollout_pages.count_page, where, order)


async def test_pages_are_filtered_and_ordered(store: SQLStore) -> None:
    await _fill(store)
    assert await _ids(store, RolloutFilter()) == ["before-greedy-00000", "c", "b", "a"]
    assert await _ids(store, RolloutFilter(), "best") == ["b", "a"]
    assert await _ids(store, RolloutFilter(), "worst") == ["a", "b"]
    assert await _ids(store, RolloutFilter(mode="val"), "best") == []
    assert await _ids(store, RolloutFilter(status="failed")) == ["c"]
    assert await _ids(store, RolloutFilter(status="failed"), "best") == []
    assert await _ids(store, RolloutFilter(step=0), "oldest") == ["a", "b", "c"]
    assert await _ids(store, RolloutFilter(step=0, group="g"), "best") == ["b", "a"]
    assert await _ids(store, RolloutFilter(min_reward=0.6)) == ["b"]
    assert await _ids(store, RolloutFilter(max_reward=0.6, group="g")) == ["a"]
    assert await _ids(store, RolloutFilter(text='SAY "B"')) == ["b"]
    assert await _ids(store, RolloutFilter(text="what now", min_reward=0.6)) == ["b"]
    assert await _ids(store, RolloutFilter(text="it broke")) == ["c"]
    assert await _ids(store, RolloutFilter(task='Say "b"')) == ["b"]
    assert await _ids(store, RolloutFilter(task="Say")) == []
    assert await _ids(store, RolloutFilter(forked=True)) == []
    assert await _ids(store, RolloutFilter(agent="")) == ["c", "b", "a"]


async def test_pages_are_counted_unless_that_takes_a_search(store: SQLStore) -> None:
    await _fill(store)
    assert await _count(store, RolloutFilter()) == 4
    assert await _count(store, RolloutFilter(mode="train")) == 3
    assert await _count(store, RolloutFilter(step=0, min_reward=0.6)) == 1
    assert await _count(store, RolloutFilter(group="g"), "best") == 2
    assert await _count(store, RolloutFilter(), "worst") == 2
    assert await _count(store, RolloutFilter(min_reward=0.6)) == 1
    assert await _count(store, RolloutFilter(text="say")) is None
    assert await _count(store, RolloutFilter(mode="train"), "best") is None


async def test_a_page_continues_after_the_one_before(store: SQLStore) -> None:
    await _fill(store)
    page = await store.browse(rollout_pages.read_page, RolloutFilter(), order="worst", limit=1)
    [row] = page.rows
    assert (row.calls, row.forks, row.sampled_tokens, row.step) == (1, 0, 2, 0)
    assert page.next == PageCursor(row.seq, row.reward)
    rest = await store.browse(
        rollout_pages.read_page, RolloutFilter(), order="worst", after=page.next
    )
    assert [each.id for each in rest.rows] == ["b"]


@pytest.mark.parametrize("order", ["newest", "worst"])
async def test_a_search_that_takes_too_long_is_continued_by_its_cursor(
    store: SQLStore, order: Order
) -> None:
    await _fill(store)
    found: list[str] = []
    searched: list[int] = []
    after: PageCursor | None = None
    while True:
        page = await store.browse(
            rollout_pages.read_page,
            RolloutFilter(text='say "a"'),
            order=order,
            after=after,
            limit=1,
            search_s=0.0,
        )
        found += [row.id for row in page.rows]
        searched.append(page.searched)
        if page.next is None:
            break
        after = page.next
    assert found == ["a"]
    assert max(searched) == 2  # parts begin with one more than the page
    assert sum(searched) == {"newest": 4, "worst": 2}[order]


async def test_text_beyond_ascii_is_found_in_tasks_and_in_messages(store: SQLStore) -> None:
    await store.enqueue([Rollout(id="u", group="g", task="Größe 日本", max_attempts=1)])
    attempt = await claim(store, "w")
    call = full_call(attempt.id)
    message = {"role": "user", "content": "Straße"}
    await store.append(call.model_copy(update={"messages": (message,)}))
    for text in ("GRöße", "日本", "STRAße"):
        assert await _ids(store, RolloutFilter(text=text)) == ["u"]


async def test_summaries_count_what_is_there(store: SQLStore) -> None:
    await _fill(store)
    [group] = await store.browse(
        rollout_pages.read_groups, mode="train", step=0, before=None, limit=5
    )
    assert (group.rollouts, group.failed, group.mean, group.max) == (3, 1, 0.75, 1.0)
    [step] = await store.browse(browse.read_step_rows, -1)
    assert (step.metrics, step.rollouts) == ({"reward": 0.75}, 3)
    counts = await store.browse(browse.read_change_counts)
    assert counts["rollouts"] == {"failed": 1, "queued": 1, "succeeded": 2}
    assert await store.browse(browse.read_statuses) == {
        "train": {"failed": 1, "succeeded": 2},
        "val": {"queued": 1},
    }
    [failure] = await store.browse(browse.read_failed, 5)
    assert (failure.id, failure.step, failure.failure["message"]) == ("c", 0, "it broke")
    assert await store.browse(browse.read_retried, 5) == []
    [reward] = await store.browse(browse.read_rewards, 0)
    assert (reward.key, reward.rewards, reward.mean) == ("k", 3, 2.0)
    outcomes = await store.browse(browse.read_outcomes, 0, 10)
    assert [(o.id, o.reward, o.sampled_tokens) for o in outcomes] == [("a", 0.5, 2), ("b", 1.0, 2)]
    [trial] = await store.browse(browse.read_evaluated, 5)
    assert (trial.status, trial.failure, trial.task) == ("queued", "", "t")


async def test_single_records_are_found_by_their_ids(store: SQLStore) -> None:
    await _fill(store)
    assert await store.browse(browse.read_rollout_id, "a.1") == "a"
    found = await store.browse(rollout_pages.read_rollout, "a")
    assert (found.reward, found.calls, found.sampled_tokens) == (0.5, 1, 2)
    assert await store.browse(browse.read_run_names) == [store.run]
    [(name, version, _)] = await store.browse(browse.read_resource_names)
    assert (name, version) == ("prompt", 2)
    versions = await store.browse(browse.read_versions, "prompt", 5)
    assert [value for _, value, _ in versions] == [{"x": 2}, {"x": 1}]
    await claim(store, "w")
    [(attempt, worker, *_)] = await store.browse(browse.read_running, 5)
    assert (attempt, worker) == ("before-greedy-00000.1", "w")
    with pytest.raises(NotFound):
        await store.browse(browse.read_rollout_id, "none")
    with pytest.raises(NotFound):
        await store.browse(rollout_pages.read_rollout, "none")
