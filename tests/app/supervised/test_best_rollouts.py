"""Examples from the rollouts of a run."""

from pathlib import Path

import pytest

from support.store.records import MINUTE, call, rollouts
from whet.app.supervised.best_rollouts import read_best
from whet.config import SelectionConfig
from whet.errors import ConfigError
from whet.protocols import Store
from whet.store.sqlite import SQLiteStore
from whet.types import Outcome, digest_tokens


async def record_group(store: Store, *rewards: float) -> None:
    await store.enqueue(rollouts(*"abc"[: len(rewards)]))
    for reward in rewards:
        attempt = await store.claim("w", lease_s=MINUTE, wait_s=0)
        assert attempt is not None
        made = call(attempt.id, f"{attempt.id}-call")
        proof = digest_tokens(made.prompt_suffix).hexdigest()
        await store.append(made.model_copy(update={"prompt_digest": proof}))
        await store.finish(attempt.id, Outcome(reward=reward))


@pytest.mark.anyio
async def test_the_best_of_a_group_is_an_example_and_that_of_equals_is_none(
    tmp_path: Path,
) -> None:
    async with SQLiteStore(tmp_path / "store.db") as store:
        await record_group(store, 0.7, 0.7, 0.7)  # their mean is rounded to less than 0.7
        with pytest.raises(ConfigError, match="rewards are equal within each group"):
            await read_best(store, SelectionConfig(), min_reward=None, best=1)
        other = store.for_run("other")
        await record_group(other, 0.7, 0.9, 0.7)
        [example] = await read_best(other, SelectionConfig(), min_reward=None, best=1)
        assert example.name == "b"
