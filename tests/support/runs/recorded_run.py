"""Runs with records of every kind, made without a model: for what shows them."""

from pathlib import Path

from pydantic import JsonValue

from support.store.records import MINUTE
from whet.app.run_folder import RunFolder
from whet.config import RunConfig
from whet.store.sqlite import SQLiteStore
from whet.types import (
    Attempt,
    Call,
    CallId,
    Failure,
    FailureKind,
    Fork,
    Generation,
    GenerationId,
    Origin,
    Outcome,
    Reward,
    Rollout,
    Sampling,
    Span,
    StepRecord,
    Target,
    digest_tokens,
)

PAYLOAD = "<img src=x onerror='window.pwned=1'></script><script>window.pwned=1</script>"
"""Text that would run, if it ever became HTML."""

GROUP_SIZE = 4


QUESTION = "What is 3*4?"


def make_folder(directory: Path, name: str = "mine", text: str = QUESTION) -> RunFolder:
    """A folder of a run, whose named rewards are known to its config."""
    known = {"logged_keys": [text, "tool"]}
    settings = {"dir": directory, "name": name, "group_size": GROUP_SIZE, "algorithm": known}
    return RunFolder.create(RunConfig.model_validate(settings), "train")


async def record_run(folder: RunFolder, *, steps: int = 2, text: str = QUESTION) -> None:
    """Record steps of two groups each; the last rollout of every other group fails."""
    async with SQLiteStore(folder.store) as store:
        await store.publish("prompt", {"template": text, "api_key": "sk-secret"})
        for step in range(steps):
            await record_step(store, step, text)
        await store.enqueue([_rollout("waits", "waits", text)])


async def record_step(store: SQLiteStore, step: int, text: str) -> None:
    """Record one more step, and the rollouts it consumed."""
    ids: list[str] = []
    advantages: dict[GenerationId, float] = {}
    for number in (2 * step, 2 * step + 1):
        group = f"train-{number:06d}"
        names = [f"{group}-{n:03d}" for n in range(GROUP_SIZE)]
        await store.enqueue([_rollout(name, group, text) for name in names])
        ids += names
        for n in range(GROUP_SIZE):
            attempt = await store.claim(text, lease_s=MINUTE, wait_s=0)
            assert attempt is not None
            await _play(store, attempt, text, step)
            breaks = n == 3 and number % 2 == 0
            await store.finish(attempt.id, _outcome(text, n / 2, breaks=breaks))
            ids_of_calls = (f"{attempt.id}-{turn}.0" for turn in (1, 2, 3))
            advantages |= {GenerationId(id): n / 2 - 0.75 for id in ids_of_calls}
    metrics = {
        "reward": 0.5 + 0.1 * step,
        "reward_std": 0.3,
        "rollouts": len(ids),
        "sampled_tokens": 160,
        "step_seconds": 2.0,
        "collect_seconds": 1.5,
        "train_seconds": 0.5,
        "logprob_gap": float("nan"),
        "unproven_generations": 0,
        "judge/score": 0.6,
        "judge/disagreement": 0.3,
    }
    await store.commit(
        StepRecord(
            step=step,
            version=step + 1,
            checkpoint=f"step-{step:06d}",
            consumed=tuple(ids),
            metrics=metrics,
        ),
        advantages=advantages,
    )


def _rollout(id: str, group: str, text: str) -> Rollout:
    return Rollout(id=id, group=group, task={"question": text, "n": id}, max_attempts=1)


def _outcome(text: str, reward: float, *, breaks: bool) -> Outcome:
    if not breaks:
        return Outcome(reward=reward)
    failure = Failure(kind=FailureKind.AGENT, message=f"raised {text}", traceback=f"at {text}")
    return Outcome(failure=failure)


async def _play(store: SQLiteStore, attempt: Attempt, text: str, version: int) -> None:
    """Two turns, then a fork that edits the history."""
    first = _call(attempt, "1", None, (1, 2, 3), text, version)
    parent = first.generation_id(0)
    second = _call(attempt, "2", (first, parent), (6, 7), text, version)
    third = _call(attempt, "3", None, (1, 2, 9), text, version, fork=Fork.EDITED_HISTORY)
    for call in (first, second, third):
        await store.append(call)
    await store.emit(attempt.id, Reward(value=0.5, key=text))
    await store.emit(attempt.id, Reward(value=1.0, key="tool", target=Target(call=first.id)))
    await store.record(attempt.id, [_span(text)])


def _call(
    attempt: Attempt,
    name: str,
    parent: tuple[Call, GenerationId] | None,
    context: tuple[int, ...],
    text: str,
    version: int,
    *,
    fork: Fork | None = None,
) -> Call:
    before = (*parent[0].prompt_suffix, *parent[0].generations[0].tokens) if parent else ()
    prompt = (*before, *context)
    tool: dict[str, JsonValue] = {"id": "call_1", "name": text, "arguments": text}
    return Call(
        id=CallId(f"{attempt.id}-{name}"),
        attempt=attempt.id,
        parent=parent[1] if parent else None,
        root="root",
        messages=({"role": "user", "content": text},),
        prompt_suffix=context,
        prompt_length=len(prompt),
        prompt_digest=digest_tokens(prompt).hexdigest(),
        generations=(
            Generation(
                tokens=(370, 334, 375),
                logprobs=(-0.05, -2.0, float("-inf")),
                versions=(version, version, version + 1),
                stop="stop",
                sampling=Sampling(),
                message={"role": "assistant", "content": text, "tool_calls": [tool]},
            ),
        ),
        created=1000.0,
        origin=Origin(agent=text, model=text, tools=(text,), fork=fork),
    )


def _span(text: str) -> Span:
    return Span(
        trace_id="ab" * 16,
        span_id="cd" * 8,
        name=text,
        start=2**62,
        end=2**62 + 5_000_000,
        status="error",
        message=text,
        attributes={text: text},
    )
