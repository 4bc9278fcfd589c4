"""The supervised training loop: imitation of dialogues, and preferences between two.

Both are sums of weighted log-probabilities, which every trainer's `cross_entropy` computes. For
imitation the weights are constant. The gradient of the DPO loss (arXiv:2305.18290) of a pair is

    beta sigmoid(-margin) (grad log p(rejected) - grad log p(chosen))
    margin = beta (log p(chosen) - log q(chosen) - log p(rejected) + log q(rejected))

with q the model before training: a forward pass of the scorer gives the margin, and with it the
weights of both sides.
"""

import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Protocol

from whet.config import LossConfig, RunConfig
from whet.protocols import Scorer, StepLog, TrainingBackend
from whet.training.rows import normalize
from whet.types import Metrics, Row, StepRecord

CROSS_ENTROPY = LossConfig(name="cross_entropy")
SUMS = ("trained_tokens", "computed_tokens")


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """Rows to imitate; in a preference pair those to prefer to the `rejected` ones."""

    name: str
    """Where it comes from: a line of a file, or a rollout."""
    rows: tuple[Row, ...]
    rejected: tuple[Row, ...] = ()


Reference = Mapping[str, tuple[float, float]]
"""Log-probabilities of both sides of each pair before training, by name."""


class Objective(Protocol):
    """A loss over examples, as weights of their tokens."""

    async def weigh(self, batch: Sequence[SupervisedExample]) -> tuple[list[Row], Metrics]:
        """Return the rows of a batch with their weights, and metrics that replace the trainer's."""
        ...

    async def measure(self, examples: Sequence[SupervisedExample]) -> Metrics:
        """Return the metrics of examples that are not trained."""
        ...


@dataclass(frozen=True, slots=True)
class Imitation(Objective):
    """The mean negative log-likelihood of the examples' tokens."""

    scorer: Scorer

    async def weigh(self, batch: Sequence[SupervisedExample]) -> tuple[list[Row], Metrics]:
        rows = [row for example in batch for row in example.rows]
        return normalize(rows, CROSS_ENTROPY, rollouts=len(batch)), {}

    async def measure(self, examples: Sequence[SupervisedExample]) -> Metrics:
        scores = await score_examples(self.scorer, [example.rows for example in examples])
        tokens = sum(row.trained_tokens for example in examples for row in example.rows)
        return {"loss": -sum(scores) / tokens}


@dataclass(frozen=True, slots=True)
class Preference(Objective):
    """The DPO loss of pairs, by sums of log-probabilities over each side."""

    scorer: Scorer
    beta: float
    reference: Reference

    async def weigh(self, batch: Sequence[SupervisedExample]) -> tuple[list[Row], Metrics]:
        margins = await self._compute_margins(batch)
        rows: list[Row] = []
        for pair, margin in zip(batch, margins, strict=True):
            weight = self.beta * _sigmoid(-margin) / len(batch)
            rows += [_weigh(row, weight, 1.0) for row in pair.rows]
            rows += [_weigh(row, weight, -1.0) for row in pair.rejected]
        return rows, _describe(margins)

    async def measure(self, examples: Sequence[SupervisedExample]) -> Metrics:
        return _describe(await self._compute_margins(examples))

    async def _compute_margins(self, pairs: Sequence[SupervisedExample]) -> list[float]:
        found = await score_pairs(self.scorer, pairs)
        margins: list[float] = []
        for pair in pairs:
            (chosen, rejected), (chosen_q, rejected_q) = found[pair.name], self.reference[pair.name]
            margins.append(self.beta * ((chosen - chosen_q) - (rejected - rejected_q)))
        return margins


async def score_pairs(scorer: Scorer, pairs: Sequence[SupervisedExample]) -> Reference:
    """Return the log-probabilities of both sides of each pair under the scorer's weights."""
    sides = [side for pair in pairs for side in (pair.rows, pair.rejected)]
    scores = await score_examples(scorer, sides)
    return {pair.name: (scores[2 * n], scores[2 * n + 1]) for n, pair in enumerate(pairs)}


async def score_examples(scorer: Scorer, examples: Sequence[Sequence[Row]]) -> list[float]:
    """Return the log-probability of the segments of each sequence of rows."""
    rows = [row for example in examples for row in example]
    # A row may come twice, as the chosen side of several pairs.
    unique = list(dict.fromkeys(row.tokens for row in rows))
    logprobs = dict(zip(unique, await scorer.logprobs(unique), strict=True))

    def score(row: Row) -> float:
        # The first token of a row has no log-probability.
        found = logprobs[row.tokens]
        return sum(sum(found[s.start - 1 : s.end - 1]) for s in row.segments)

    return [sum(map(score, example)) for example in examples]


async def fit(
    examples: Sequence[SupervisedExample],
    held_out: Sequence[SupervisedExample],
    objective: Objective,
    config: RunConfig,
    *,
    checkpoints: Path,
    trainer: TrainingBackend,
    log: StepLog,
    on_update: Callable[[], None] = lambda: None,
) -> AsyncGenerator[StepRecord]:
    """Run the remaining `config.steps` optimizer steps; yield a record for each checkpoint.

    A record stands for the optimizer steps since the previous one: its version is their number
    since the start. What is not in the log did not happen, and is repeated after a crash.
    """
    if done := await log.steps():
        await trainer.restore(checkpoints / done[-1].checkpoint)
    updates = done[-1].version if done else 0
    while updates < config.steps:
        began = time.monotonic()
        metrics: dict[str, float] = {}
        if not done and held_out:
            metrics |= _prefix_names("base_held_out_", await objective.measure(held_out))
        block = range(updates, min(updates + config.supervised.checkpoint_every, config.steps))
        found: list[Metrics] = []
        for update in block:
            rows, own = await objective.weigh(select_nth_batch(examples, update, config))
            trained = await trainer.forward_backward(rows, CROSS_ENTROPY)
            adam = config.adam.build_step(update, config.steps, config.trained_weights)
            step = await trainer.optim_step(adam)
            kept = {name: trained[name] for name in ("loss", *SUMS) if name in trained}
            found.append({**kept, **step, **own})
            on_update()
        metrics |= _summarize(found)
        if held_out:
            metrics |= _prefix_names("held_out_", await objective.measure(held_out))
        updates = block.stop
        checkpoint = f"step-{updates - 1:06d}"
        await trainer.save(checkpoints / checkpoint)
        record = StepRecord(
            step=len(done),
            version=updates,
            checkpoint=checkpoint,
            consumed=(),
            metrics=metrics | {"updates": len(block), "seconds": time.monotonic() - began},
        )
        await log.commit(record)
        done.append(record)
        yield record


def select_nth_batch(
    examples: Sequence[SupervisedExample], update: int, config: RunConfig
) -> list[SupervisedExample]:
    """Return the examples of an optimizer step: each once an epoch, shuffled by the seed.

    A pure function, so that a resumed run continues with the same batches.
    """
    size = config.supervised.batch_size
    epoch, index = divmod(update, math.ceil(len(examples) / size))
    order = list(range(len(examples)))
    random.Random(f"{config.seed}/{epoch}").shuffle(order)
    return [examples[n] for n in order[index * size : (index + 1) * size]]


def count_updates(examples: int, config: RunConfig) -> int:
    """Return the number of optimizer steps of all epochs."""
    return config.supervised.epochs * math.ceil(examples / config.supervised.batch_size)


def _weigh(row: Row, weight: float, sign: float) -> Row:
    segments = [
        replace(s, weight=weight, advantages=(sign,) * len(s.logprobs)) for s in row.segments
    ]
    return replace(row, segments=tuple(segments))


def _describe(margins: Sequence[float]) -> Metrics:
    return {
        # log(1 + exp(-x)) without overflow
        "loss": fmean(max(-m, 0.0) + math.log1p(math.exp(-abs(m))) for m in margins),
        "margin": fmean(margins),
        "accuracy": fmean(margin > 0 for margin in margins),
    }


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _summarize(found: Sequence[Metrics]) -> dict[str, float]:
    """Sums of tokens, the last learning rate, and means of everything else."""
    summary = {name: fmean(metrics[name] for metrics in found) for name in found[0]}
    summary |= {name: sum(m[name] for m in found) for name in SUMS if name in summary}
    return summary | {"learning_rate": found[-1]["learning_rate"]}


def _prefix_names(prefix: str, metrics: Metrics) -> dict[str, float]:
    return {prefix + name: value for name, value in metrics.items()}
