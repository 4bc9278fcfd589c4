"""Rollouts, attempts, calls, spans and steps for tests of the store."""

from typing import Literal

from whet.protocols import Store
from whet.types import (
    RETRYABLE,
    Attempt,
    AttemptId,
    Call,
    CallId,
    Failure,
    FailureKind,
    Generation,
    GenerationId,
    Outcome,
    Rollout,
    Sampling,
    Span,
    SpanEvent,
    StepRecord,
)

MINUTE = 60.0
SOON = 0.02
"""A lease so short that its end can be waited for."""

WON = Outcome(reward=1.0)

ADVANTAGES = {GenerationId("c1.0"): 0.75, GenerationId("c2.0"): -0.25}


def rollouts(*ids: str) -> list[Rollout]:
    return [Rollout(id=id_, task=id_, group="g") for id_ in ids]


def call(attempt: AttemptId, name: str, tokens: tuple[int, ...] = (4, 5)) -> Call:
    return Call(
        id=CallId(name),
        attempt=attempt,
        parent=None,
        root="root",
        messages=(),
        prompt_suffix=(1, 2, 3),
        prompt_length=3,
        prompt_digest="digest",
        generations=(
            Generation(
                tokens=tokens,
                logprobs=(-0.5,) * len(tokens),
                versions=(1,) * len(tokens),
                stop="stop",
                sampling=Sampling(),
                message={},
            ),
        ),
        created=0.0,
    )


def rollout(
    id_: str,
    *,
    max_attempts: int = 2,
    priority: int = 0,
    retried: tuple[FailureKind, ...] = RETRYABLE,
    resources: dict[str, int | Literal["latest"]] | None = None,
) -> Rollout:
    return Rollout(
        id=id_,
        task={"question": id_},
        group="g",
        max_attempts=max_attempts,
        priority=priority,
        retried=retried,
        resources=resources or {},
    )


def failed(kind: FailureKind = FailureKind.AGENT) -> Outcome:
    return Outcome(failure=Failure(kind=kind, message="it broke"))


def full_call(attempt: AttemptId, name: str = "c", *, parent: GenerationId | None = None) -> Call:
    return Call(
        id=CallId(f"{attempt}-{name}"),
        attempt=attempt,
        parent=parent,
        root="root",
        messages=({"role": "user", "content": "what now?"},),
        prompt_suffix=(1, 2, 3),
        prompt_length=3,
        prompt_digest="digest",
        generations=(
            Generation(
                tokens=(4, 151_935),
                logprobs=(-0.1, float("-inf")),
                versions=(6, 7),
                stop="stop",
                sampling=Sampling(temperature=0.7, stop=("\n",), stop_ids=(5,)),
                message={"role": "assistant", "content": "this", "tool_calls": [{"id": "t"}]},
            ),
            Generation(
                tokens=(),
                logprobs=(),
                versions=(),
                stop="length",
                sampling=Sampling(),
                message={"role": "assistant", "content": None},
            ),
        ),
        created=1234.5678,
    )


def step(number: int, *consumed: str) -> StepRecord:
    return StepRecord(
        step=number,
        version=number + 1,
        checkpoint=f"step-{number}",
        consumed=consumed,
        metrics={"loss": 0.1 + number},
    )


def span(number: int, *, start: int = 0, name: str = "chat") -> Span:
    """With whatever an attribute may be."""
    return Span(
        trace_id="ab" * 16,
        span_id=f"{number:016x}",
        parent_id="0" * 15 + "1" if number > 1 else None,
        name=name,
        kind="client",
        start=2**63 - 1 - start,
        end=2**63 - 1,
        status="error",
        message="it broke",
        attributes={
            "gen_ai.response.id": "chatcmpl-1",
            "big": 2**63 - 1,
            "list": [1.5, True, None],
        },
        events=(SpanEvent(name="exception", time=5, attributes={"x": "\x00 é"}),),
        scope="strands.telemetry",
        resource={"service.name": "s"},
    )


async def claim(store: Store, worker: str = "w", *, lease_s: float = MINUTE) -> Attempt:
    attempt = await store.claim(worker, lease_s=lease_s, wait_s=0)
    assert attempt is not None
    return attempt


async def nothing_to_claim(store: Store) -> bool:
    return await store.claim("w", lease_s=MINUTE, wait_s=0) is None


async def finish_all(store: Store, *ids: str) -> None:
    await store.enqueue([rollout(id_) for id_ in ids])
    for _ in ids:
        await store.finish((await claim(store)).id, WON)
