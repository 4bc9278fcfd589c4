"""An export holds everything, whatever was stored."""

from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from whet.store.sqlite import SQLiteStore
from whet.types import (
    Attempt,
    Call,
    CallId,
    Failure,
    FailureKind,
    Generation,
    GenerationId,
    Mode,
    Outcome,
    Reward,
    Rollout,
    Sampling,
    StepRecord,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ANY_TEXT = st.text(st.characters(exclude_categories=[]))
JSON: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FINITE | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=5,
)
SAMPLED = st.lists(st.tuples(INT32, st.floats(allow_nan=False), st.integers(0, 3)), max_size=20)
OUTCOMES = st.one_of(
    st.none(),
    FINITE.map(lambda reward: Outcome(reward=reward)),
    st.builds(
        lambda kind, message: Outcome(failure=Failure(kind=kind, message=message)),
        st.sampled_from(FailureKind),
        ANY_TEXT,
    ),
)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    return Rollout(
        id=f"r{draw(st.integers(0, 1000))}",
        task=draw(JSON),
        group=draw(st.sampled_from(["g", "h"])),
        mode=draw(st.sampled_from(Mode)),
        priority=draw(INT32),
        timeout_s=draw(st.floats(0.1, 1e6)),
        max_attempts=draw(st.integers(1, 3)),
        retried=tuple(draw(st.sets(st.sampled_from(FailureKind)))),
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[Generation, list[int], JsonValue]:
    sampled = draw(SAMPLED)
    generation = Generation(
        tokens=tuple(token for token, _, _ in sampled),
        logprobs=tuple(logprob for _, logprob, _ in sampled),
        versions=tuple(version for _, _, version in sampled),
        stop="stop",
        sampling=Sampling(seed=draw(st.none() | INT32)),
        message={"content": draw(JSON)},
    )
    return generation, draw(st.lists(INT32, max_size=10)), draw(JSON)


def call(attempt: Attempt, n: int, parts: tuple[Generation, list[int], JsonValue]) -> Call:
    generation, context, content = parts
    return Call(
        id=CallId(f"c{n}"),
        attempt=attempt.id,
        parent=None,
        root="root",
        messages=({"content": content},),
        prompt_suffix=tuple(context),
        prompt_length=len(context),
        prompt_digest="digest",
        generations=(generation,),
        created=n / 7,
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(
    planned=st.lists(rollouts(), max_size=5, unique_by=lambda rollout: rollout.id),
    lived=st.lists(st.tuples(st.lists(calls(), max_size=2), FINITE, OUTCOMES), max_size=6),
    value=JSON,
    metrics=st.dictionaries(st.text(st.characters(categories=["L"])), FINITE, max_size=3),
)
def test_a_run_is_loaded_exactly_as_it_was(
    planned: list[Rollout],
    lived: list[tuple[list[tuple[Generation, list[int], JsonValue]], float, Outcome | None]],
    value: JsonValue,
    metrics: dict[str, float],
) -> None:
    async def live(store: SQLiteStore) -> None:
        await store.publish("prompt", value)
        await store.enqueue(planned)
        for texts, reward, outcome in lived:
            attempt = await store.claim("w", lease_s=60, wait_s=0)
            if attempt is None:
                break
            for n, parts in enumerate(texts):
                await store.append(call(attempt, n, parts))
            await store.emit(attempt.id, Reward(value=reward))
            if outcome is not None:
                await store.finish(attempt.id, outcome)
        record = StepRecord(step=0, version=1, checkpoint="c", consumed=(), metrics=metrics)
        await store.commit(record, advantages={GenerationId(k): v for k, v in metrics.items()})

    async def everything(store: SQLiteStore) -> list[object]:
        records = await store.rollouts()
        ids = [record.rollout.id for record in records]
        attempts = [attempt for id_ in ids for attempt in await store.attempts(id_)]
        return [
            records,
            attempts,
            [[c.model_dump() for c in await store.calls(attempt.id)] for attempt in attempts],
            await store.trajectories(ids),
            await store.steps(),
            await store.advantages(0),
            await store.resources(),
            await store.workers(),
        ]

    async def main(folder: Path) -> None:
        async with SQLiteStore(folder / "a.db") as ours, SQLiteStore(folder / "b.db") as theirs:
            await live(ours)
            await ours.export(folder / "a.zip")
            await theirs.load(folder / "a.zip")
            assert await everything(theirs) == await everything(ours)
            await theirs.export(folder / "b.zip")
        assert (folder / "a.zip").read_bytes() == (folder / "b.zip").read_bytes()

    with TemporaryDirectory() as name:
        anyio.run(main, Path(name))
