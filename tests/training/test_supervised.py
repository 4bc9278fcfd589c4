"""Losses of dialogues and pairs by hand and by TRL's code, and the loop around them."""

import ast
from collections import Counter, defaultdict
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from support.models.tiny_llama import load, make_model
from whet.config import AdamStep, LocalTrainerConfig, RunConfig, SupervisedConfig
from whet.engines.scorer import LocalScorer
from whet.store.sqlite import SQLiteStore
from whet.trainers.local import LocalTrainer
from whet.training.supervised import (
    CROSS_ENTROPY,
    Imitation,
    Preference,
    SupervisedExample,
    count_updates,
    fit,
    score_pairs,
    select_nth_batch,
)
from whet.types import GenerationId, Row, SampledSegment

pytestmark = pytest.mark.anyio

BETA = 0.3


def row(tokens: list[int], *segments: tuple[int, int], name: str = "a") -> Row:
    """A row whose tokens are trained from each start to each end."""
    found = [
        SampledSegment(
            generation=GenerationId(f"{name}.{start}"),
            start=start,
            logprobs=(0.0,) * (end - start),
            versions=(0,) * (end - start),
            advantages=(1.0,) * (end - start),
            weight=1.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        )
        for start, end in segments
    ]
    return Row(tuple(tokens), tuple(found), name, name)


PAIRS = [
    SupervisedExample("a", (row([5, 6, 7, 8, 9], (2, 5)),), (row([5, 6, 1, 2], (2, 4)),)),
    # A side of two rows, as of an agent that had two conversations.
    SupervisedExample(
        "b", (row([3, 4, 5], (1, 3)), row([9, 9, 8], (2, 3))), (row([3, 1, 2, 2], (1, 4)),)
    ),
    SupervisedExample("c", (row([1, 2, 3, 4, 5, 6], (1, 2), (4, 6)),), (row([1, 7], (1, 2)),)),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def sequence_logprob(policy: Any, rows: tuple[Row, ...]) -> Tensor:
    """The log-probability of the trained tokens, each row by itself."""
    sums = []
    for each in rows:
        logits = policy.model(input_ids=torch.tensor([each.tokens])).logits[0].log_softmax(-1)
        for s in each.segments:
            sums += [logits[p - 1, each.tokens[p]] for p in range(s.start, s.end)]
    return torch.stack(sums).sum()


def gradients(policy: Any, trainer: LocalTrainer) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in trainer._weights._master.items() if p.grad is not None}


async def moved(model: Path) -> tuple[Any, LocalTrainer, Any]:
    """A policy some steps away from its reference."""
    policy = load(model, weights="full")
    trainer, scorer = LocalTrainer(policy), LocalScorer(policy)
    reference = await score_pairs(scorer, PAIRS)
    objective = Preference(scorer, BETA, reference)
    for _ in range(3):
        rows, _ = await objective.weigh(PAIRS)
        await trainer.forward_backward(rows, CROSS_ENTROPY)
        await trainer.optim_step(AdamStep(lr=3e-3))
    return policy, trainer, objective


async def test_the_gradient_of_pairs_is_that_of_dpo(model: Path) -> None:
    policy, trainer, objective = await moved(model)
    rows, metrics = await objective.weigh(PAIRS)
    await trainer.forward_backward(rows, CROSS_ENTROPY)
    found = gradients(policy, trainer)
    losses = []
    for pair in PAIRS:
        chosen_q, rejected_q = objective.reference[pair.name]
        chosen = sequence_logprob(policy, pair.rows) - chosen_q
        rejected = sequence_logprob(policy, pair.rejected) - rejected_q
        losses.append(-F.logsigmoid(BETA * (chosen - rejected)))
    loss = torch.stack(losses).mean()
    parameters = policy.get_trainable()
    expected = torch.autograd.grad(loss, list(parameters.values()))
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["loss"] < 0.69
    for name, gradient in zip(parameters, expected, strict=True):
        assert torch.allclose(found[name], gradient, atol=2e-6), name


def trl_dpo_loss(chosen: Tensor, rejected: Tensor, chosen_q: Tensor, rejected_q: Tensor) -> Tensor:
    """The loss of TRL's trainer for log-probabilities of sequences, by its own code."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).with_name("trainer") / "dpo_trainer.py"
    [method] = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "_compute_loss"
    ]
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(ast.Module([method], []), "dpo_trainer.py", "exec"), names)
    logps_B1 = torch.cat([chosen, rejected])[:, None]
    outputs = SimpleNamespace(
        log_probs=logps_B1,
        entropy=torch.zeros_like(logps_B1),
        mean_logits=torch.zeros_like(logps_B1),
        is_top1=torch.zeros_like(logps_B1, dtype=torch.bool),
    )
    gather = SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=gather,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=BETA,
        use_weighting=False,
        _metrics={"eval": defaultdict(list), "train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "completion_mask": torch.ones(len(logps_B1), 2, dtype=torch.long),
        "input_ids": torch.zeros(len(logps_B1), 2, dtype=torch.long),
        "attention_mask": torch.ones(len(logps_B1), 2, dtype=torch.long),
        "ref_chosen_logps": chosen_q,
        "ref_rejected_logps": rejected_q,
    }
    return names["_compute_loss"](trainer, lambda **_: outputs, inputs, return_outputs=False)


async def test_the_weights_of_pairs_are_the_derivatives_of_trls_loss(model: Path) -> None:
    policy, _, objective = await moved(model)
    now = await score_pairs(LocalScorer(policy), PAIRS)
    chosen, rejected = (
        torch.tensor([now[p.name][side] for p in PAIRS], requires_grad=True) for side in (0, 1)
    )
    chosen_q, rejected_q = (
        torch.tensor([objective.reference[p.name][side] for p in PAIRS]) for side in (0, 1)
    )
    loss = trl_dpo_loss(chosen, rejected, chosen_q, rejected_q)
    by_chosen, by_rejected = torch.autograd.grad(loss, [chosen, rejected])
    rows, metrics = await objective.weigh(PAIRS)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for index, pair in enumerate(PAIRS):
        sides = [r for r in rows if r.rollout == "a" and r.tokens in {e.tokens for e in pair.rows}]
        segment = sides[0].segments[0]
        assert segment.weight * segment.advantages[0] == pytest.approx(-by_chosen[index].item())
        [lost] = [r for r in rows if r.tokens == pair.rejected[0].tokens]
        weight = lost.segments[0].weight * lost.segments[0].advantages[0]
        assert weight == pytest.approx(-by_rejected[index].item())


async def test_imitation_is_the_mean_loss_of_trained_tokens(model: Path) -> None:
    policy = load(model, weights="full")
    trainer, objective = LocalTrainer(policy), Imitation(LocalScorer(policy))
    examples = [SupervisedExample(p.name, p.rows) for p in PAIRS]
    rows, _ = await objective.weigh(examples)
    found = await trainer.forward_backward(rows, CROSS_ENTROPY)
    tokens = sum(r.trained_tokens for r in rows)
    expected = -sum(sequence_logprob(policy, e.rows).item() for e in examples) / tokens
    assert found["loss"] == pytest.approx(expected, abs=1e-5)
    measured = await objective.measure(examples)
    assert measured["loss"] == pytest.approx(expected, abs=1e-5)


def config(**settings: object) -> RunConfig:
    supervised = SupervisedConfig.model_validate({"batch_size": 3, "epochs": 2} | settings)
    return RunConfig(supervised=supervised)


def test_every_example_comes_once_an_epoch_in_another_order() -> None:
    examples = [SupervisedExample(str(n), ()) for n in range(8)]
    settings = config()
    assert count_updates(8, settings) == 6
    batches = [[e.name for e in select_nth_batch(examples, n, settings)] for n in range(6)]
    assert [len(batch) for batch in batches] == [3, 3, 2, 3, 3, 2]
    first, second = ([*chain(*half)] for half in (batches[:3], batches[3:]))
    assert Counter(first) == Counter(second) == Counter(map(str, range(8)))
    assert first != second


@pytest.mark.parametrize(("weights", "rate"), [("lora", 1e-4), ("full", 1e-6)])
async def test_the_learning_rate_is_that_of_the_trained_weights(
    model: Path, tmp_path: Path, weights: Literal["lora", "full"], rate: float
) -> None:
    policy = load(model, weights=weights)
    trainer = LocalTrainerConfig(weights=weights)
    async with SQLiteStore(tmp_path / "store.db") as log:
        records = fit(
            [SupervisedExample(p.name, p.rows) for p in PAIRS],
            [],
            Imitation(LocalScorer(policy)),
            config().model_copy(update={"steps": 1, "trainer": trainer}),
            checkpoints=tmp_path,
            trainer=LocalTrainer(policy),
            log=log,
        )
        assert [step.metrics["learning_rate"] async for step in records] == [rate]


async def test_a_run_that_is_broken_off_continues_with_the_same_batches(
    model: Path, tmp_path: Path
) -> None:
    examples = [SupervisedExample(p.name, p.rows) for p in PAIRS]
    settings = config(batch_size=1, epochs=2, checkpoint_every=2).model_copy(update={"steps": 6})

    async def train(folder: Path, stop_after: int) -> tuple[dict[str, Tensor], list[int]]:
        policy = load(model, weights="full")
        trainer = LocalTrainer(policy)
        async with SQLiteStore(folder / "store.db") as log:
            updates = 0

            def on_update() -> None:
                nonlocal updates
                updates += 1
                if updates == stop_after:
                    raise KeyboardInterrupt

            records = fit(
                examples,
                examples[:1],
                Imitation(LocalScorer(policy)),
                settings,
                checkpoints=folder,
                trainer=trainer,
                log=log,
                on_update=on_update,
            )
            try:
                async for _ in records:
                    pass
            except KeyboardInterrupt:
                pass
            steps = await log.steps()
            assert all("base_held_out_loss" in s.metrics for s in steps[:1])
            weights = {n: p.detach().clone() for n, p in policy.get_trainable().items()}
            return weights, [s.version for s in steps]

    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    whole, versions = await train(tmp_path / "whole", 0)
    assert versions == [2, 4, 6]
    _, before = await train(tmp_path / "broken", 3)
    assert before == [2]
    broken, after = await train(tmp_path / "broken", 0)
    assert after == versions
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
