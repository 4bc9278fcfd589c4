"""The saving of one row per conversation over one row per call.

    python bench/merge.py [--turns 20] [--conversations 4]

A conversation of T turns is sampled through the gateway with the tiny model. It is then trained
(a) as whet does, one row in which every token stands once, and (b) as one row for each call,
with the whole prompt again each time, each row in a pass of its own. Same weights, same run.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import anyio

from whet.config import LocalEngineConfig, LocalTrainerConfig, LossConfig
from whet.engines.local.engine import LocalEngine
from whet.gateway.messages import Message
from whet.gateway.pipeline import CallPipeline
from whet.gateway.requests import ModelRequest, RequestSource
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.training.rows import build_rows
from whet.types import Attempt, Credit, Outcome, Rollout, Row, Sampling, Trajectory


async def converse(pipeline: CallPipeline, store: SQLiteStore, name: str, turns: int) -> Trajectory:
    await store.enqueue([Rollout(id=name, task=None, group=name)])
    attempt = await store.claim("bench", lease_s=600, wait_s=0)
    assert attempt is not None
    messages = [Message("user", "Let us count together.")]
    for turn in range(turns):
        messages.append(await one_call(pipeline, attempt, tuple(messages), turn))
        messages.append(Message("user", f"Good. Number {turn + 2}, please."))
    await store.finish(attempt.id, Outcome(reward=1.0))
    return (await store.trajectories([name]))[0]


async def one_call(
    pipeline: CallPipeline, attempt: Attempt, messages: tuple[Message, ...], turn: int
) -> Message:
    request = ModelRequest(messages=messages, sampling=Sampling(max_tokens=16))
    source = RequestSource(
        attempt=attempt,
        dialect="bench",
        model=pipeline.models[0],
        agent="",
        digest=f"{attempt.id}/{turn}",
        is_retry=False,
        size=0,
    )
    _, graph = await pipeline.find(attempt.id)
    call = await pipeline.render(source, request, graph)
    completed = await pipeline.record(call, await pipeline.sample(call))
    return completed.messages[0]


def one_row_per_call(rows: list[Row]) -> list[Row]:
    return [
        replace(row, tokens=row.tokens[: segment.end], segments=(segment,))
        for row in rows
        for segment in row.segments
    ]


async def seconds(trainer: LocalTrainer, passes: list[list[Row]], repeats: int = 3) -> float:
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        for rows in passes:
            await trainer.forward_backward(rows, LossConfig())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def bench(turns: int, conversations: int) -> None:
    folder = resolve_model("tiny")
    policy = LocalPolicy(
        folder, LocalTrainerConfig(weights="full", micro_batch_tokens=4096), device="cpu", seed=0
    )
    template = ChatTemplate(folder)
    engine = LocalEngine(policy, LocalEngineConfig(), template.decode)
    trainer = LocalTrainer(policy)
    with tempfile.TemporaryDirectory() as directory:
        async with SQLiteStore(Path(directory) / "store.db") as store:
            pipeline = CallPipeline(
                engine=engine, log=store, renderer=Renderer(template), models=("policy",)
            )
            trajectories = [
                await converse(pipeline, store, f"c{number}", turns)
                for number in range(conversations)
            ]
    credits = [Credit(t, {call.generation_id(0): 1.0 for call in t.calls}) for t in trajectories]
    built = build_rows(credits)
    merged, separate = list(built.rows), one_row_per_call(list(built.rows))
    assert not built.unproven
    ours = await seconds(trainer, [merged])
    theirs = await seconds(trainer, [[row] for row in separate])
    await engine.close()
    report(turns, merged, separate, ours, theirs)


def report(turns: int, merged: list[Row], separate: list[Row], ours: float, theirs: float) -> None:
    token_ratio = sum(len(r.tokens) for r in separate) / sum(len(r.tokens) for r in merged)
    print(f"{turns} turns, {len(merged)} conversations")
    print("                      rows   tokens in rows   trained   seconds")
    for name, rows, took in (("merged", merged, ours), ("one row per call", separate, theirs)):
        tokens, trained = sum(len(r.tokens) for r in rows), sum(r.trained_tokens for r in rows)
        print(f"{name:<20} {len(rows):>5} {tokens:>16,} {trained:>9,} {took:>9.2f}")
    print(f"ratio: {token_ratio:.1f}x fewer tokens, {theirs / ours:.1f}x faster step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--conversations", type=int, default=4)
    args = parser.parse_args()
    anyio.run(bench, args.turns, args.conversations)
