"""The drift report of a small store, in which every number is known."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from whet.app.cli.doctor import describe_counts
from whet.app.inspection.exactness import build_exactness_report
from whet.config import SelectionConfig
from whet.store.sqlite import SQLiteStore
from whet.types import (
    AttemptId,
    Call,
    CallId,
    Failure,
    FailureKind,
    Fork,
    Generation,
    GenerationId,
    Mode,
    Omission,
    Origin,
    Outcome,
    Rollout,
    Sampling,
    Span,
    StepRecord,
    digest_tokens,
)

pytestmark = pytest.mark.anyio


SOLVER = Origin(agent="solver")


def call(
    id: str,
    before: Sequence[int],
    context: Sequence[int],
    sampled: Sequence[int],
    *,
    parent: str | None = None,
    proven: bool = True,
    grammar: str | None = None,
    origin: Origin = SOLVER,
) -> Call:
    """`before` are the ids of the parent's whole sequence."""
    prompt = (*before, *context)
    generation = Generation(
        tokens=tuple(sampled),
        logprobs=(-0.5,) * len(sampled),
        versions=(0,) * len(sampled),
        stop="stop",
        sampling=Sampling(grammar=grammar),
        message={"role": "assistant", "content": "x"},
    )
    return Call(
        id=CallId(id),
        attempt=AttemptId(""),
        parent=GenerationId(f"{parent}.0") if parent else None,
        root="r",
        messages=({"role": "user", "content": "x"},),
        prompt_suffix=tuple(context),
        prompt_length=len(prompt),
        prompt_digest=digest_tokens(prompt if proven else (0,)).hexdigest(),
        generations=(generation,) if sampled else (),
        created=0.0,
        origin=origin,
    )


TWO_TURNS = [
    call("c1", [], [1, 2, 3], [10, 11]),
    call(
        "c2",
        [1, 2, 3, 10, 11],
        [4],
        [12, 13, 14],
        parent="c1",
        origin=Origin(agent="solver", lossy=True, omitted=(Omission.NAME,)),
    ),
]
TITLE = call("c3", [], [5, 6], [15], origin=Origin(agent="title", fork=Fork.NEW_CONVERSATION))
DELETION = call("c4", [], [], [], origin=Origin(dialect="delete", shown={"deleted": "c1"}))
UNPROVEN = call("d1", [], [1, 2], [9, 9], proven=False)
CONSTRAINED = call("d2", [], [7], [8], grammar="start: /x/")


async def fill(store: SQLiteStore) -> None:
    works = {
        "a": (Mode.TRAIN, [*TWO_TURNS, TITLE, DELETION], Outcome(reward=1.0)),
        "b": (Mode.TRAIN, [UNPROVEN, CONSTRAINED], Outcome(reward=0.0)),
        "v": (Mode.VAL, TWO_TURNS, Outcome(reward=1.0)),
        "f": (
            Mode.TRAIN,
            TWO_TURNS,
            Outcome(failure=Failure(kind=FailureKind.TIMEOUT, message="too slow")),
        ),
    }
    for id, (mode, calls, outcome) in works.items():
        await store.enqueue([Rollout(id=id, task=None, group="g", mode=mode)])
        attempt = await store.claim("w", lease_s=60, wait_s=0)
        assert attempt is not None
        for each in calls:
            await store.append(each.model_copy(update={"attempt": attempt.id}))
        await store.finish(attempt.id, outcome)
    for step, metrics in enumerate(
        [{"logprob_gap": 0.1}, {"logprob_gap": 0.3}, {"trained_tokens": 7.0}]
    ):
        await store.commit(
            StepRecord(
                step=step, version=step + 1, checkpoint=f"{step}", consumed=(), metrics=metrics
            )
        )


async def test_every_number_of_the_report(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    async with SQLiteStore(file) as store:
        await fill(store)
        report = await build_exactness_report(store, SelectionConfig())
    assert report == {
        "verdict": "trained 7 tokens in 3 steps",
        "failed_rollouts": 1,
        "failures": {"timeout: too slow": 1},
        "rollouts": 2,
        "calls": 5,
        "rows": 2,
        "calls_per_row": 2.5,
        "sampled_tokens": 2 + 3 + 1 + 2 + 1,
        "prompt_tokens_served": 3 + 6 + 2 + 2 + 1,
        "tokens_stored": 5 + 4 + 3 + 4 + 2,
        "row_tokens": 9 + 3,
        "unproven": 1,
        "constrained": 1,
        "lossy_echoes": 1,
        "omitted_by_template": {"name of a message": 1},
        "forks": {"new_conversation": 1},
        "unselected": {},
        "without_token_ids": {},
        "logprob_gap": pytest.approx(0.2),
    }


async def test_what_selection_leaves_out_is_counted_and_in_no_row(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    async with SQLiteStore(file) as store:
        await fill(store)
        report = await build_exactness_report(store, SelectionConfig(agents=("solver",)))
    assert report["unselected"] == {"agent 'title' is not among selection.agents": 1}
    assert (report["calls"], report["rows"], report["row_tokens"]) == (5, 1, 9)


async def test_calls_that_passed_us_by_are_explained_once_for_each_server(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    async with SQLiteStore(file) as store:
        for id in "xy":
            await store.enqueue([Rollout(id=id, task=None, group="g")])
            attempt = await store.claim("w", lease_s=60, wait_s=0)
            assert attempt is not None
            request = {
                "gen_ai.request.model": "gpt",
                "server.address": "other",
                "server.port": 8000,
            }
            spans = [
                Span(trace_id="0" * 32, span_id=f"{n:016x}", name="chat", start=n, end=n + 1,
                     attributes={**request})
                for n in (1, 2)
            ]  # fmt: skip
            await store.record(attempt.id, spans)
            await store.finish(attempt.id, Outcome(reward=1.0))
        report = await build_exactness_report(store, SelectionConfig())
    assert isinstance(report["without_token_ids"], dict)
    [(why, count)] = report["without_token_ids"].items()
    assert count == 4
    assert "went to other:8000 for model 'gpt'" in why
    assert f"{why} 4" in describe_counts(report)


async def test_a_store_without_a_finished_rollout_has_no_ratios(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    async with SQLiteStore(file) as store:
        await store.enqueue([Rollout(id="a", task=None, group="g")])
        report = await build_exactness_report(store, SelectionConfig())
    assert (report["rollouts"], report["calls_per_row"], report["logprob_gap"]) == (0, None, None)
