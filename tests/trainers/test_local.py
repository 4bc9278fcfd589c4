"""The local trainer: gradients, losses, checkpoints and memory."""

import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from support.models.tiny_llama import (
    HandMade,
    ask,
    decode,
    load,
    make_model,
    nudge,
    plain_logprobs,
    prompt_of,
    row_of,
)
from support.store.trajectories import Conversation, generation
from whet.algorithms.grpo import GRPO
from whet.config import AdamConfig, AdamStep, AlgorithmConfig, LocalEngineConfig, LossConfig
from whet.engines.local.engine import LocalEngine
from whet.errors import ConfigError, NonFiniteUpdate, TrainerError
from whet.io.files import compute_checksum
from whet.models.distribution import SamplingTransform, compute_log_probs
from whet.models.huggingface import LocalPolicy
from whet.models.tree_attention import Branches
from whet.trainers.local import LocalTrainer
from whet.trainers.master_weights import MasterWeights
from whet.trainers.packing import pack
from whet.trainers.snapshot import STATE
from whet.training.rows import build_rows, normalize
from whet.types import Row, Sampling

pytestmark = pytest.mark.anyio

PPO = LossConfig()
PLAIN = LossConfig(name="importance_sampling")
ADAM = AdamStep(lr=1e-2)
CONSTANT = AdamConfig(lr=1e-2)


# --------------------------------------------------------------------------- by hand


class Coin(nn.Module):
    """Says 0 with probability sigmoid(theta), whatever came before."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(math.log(p / (1 - p))))

    @property
    def p(self) -> float:
        return torch.sigmoid(self.theta).item()

    def forward(
        self, input_ids: Tensor, logits_to_keep: Tensor, **_: object
    ) -> CausalLMOutputWithPast:
        logits_V = torch.stack([self.theta, torch.zeros(())])
        return CausalLMOutputWithPast(logits=logits_V.expand(1, len(logits_to_keep), 2))  # pyright: ignore[reportArgumentType]  # a tensor is one


def toss(
    coin: Coin, side: int, advantage: float, *, ratio: float = 1.0, weight: float = 1.0
) -> Row:
    """One token whose sampler gave it the probability that makes this ratio."""
    p = coin.p if side == 0 else 1 - coin.p
    return row_of([0], [side], [math.log(p / ratio)], advantage, weight=weight)


async def slope(coin: Coin, rows: Sequence[Row], loss: LossConfig) -> float:
    coin.theta.grad = None
    await LocalTrainer(HandMade(coin, 2)).forward_backward(rows, loss)
    assert coin.theta.grad is not None
    return coin.theta.grad.item()


async def test_the_gradient_is_minus_advantage_times_that_of_the_log_probability() -> None:
    coin = Coin(0.3)
    # d log p(0) = 1 - p, d log p(1) = -p.
    assert await slope(coin, [toss(coin, 0, 2.0)], PLAIN) == pytest.approx(-2.0 * 0.7)
    assert await slope(coin, [toss(coin, 1, 2.0)], PLAIN) == pytest.approx(2.0 * 0.3)
    assert await slope(coin, [toss(coin, 0, -1.0, weight=0.25)], PPO) == pytest.approx(0.25 * 0.7)
    both = [toss(coin, 0, 1.0, weight=0.5), toss(coin, 1, -1.0, weight=0.5)]
    assert await slope(coin, both, PPO) == pytest.approx(-0.5 * 0.7 - 0.5 * 0.3)


async def test_off_policy_each_token_counts_by_its_ratio() -> None:
    coin = Coin(0.3)
    rows = [toss(coin, 0, 1.0, ratio=3.0)]
    assert await slope(coin, rows, PLAIN) == pytest.approx(-3.0 * 0.7, rel=1e-5)
    assert await slope(coin, rows, PPO) == 0


@pytest.mark.parametrize(
    ("advantage", "ratio", "stops"),
    [(1.0, 1.3, True), (1.0, 0.7, False), (-1.0, 1.3, False), (-1.0, 0.7, True)],
)
async def test_the_clip_stops_only_ratios_beyond_it_in_the_direction_of_the_advantage(
    advantage: float, ratio: float, stops: bool
) -> None:
    coin = Coin(0.4)
    expected = 0.0 if stops else -advantage * ratio * 0.6
    assert await slope(coin, [toss(coin, 0, advantage, ratio=ratio)], PPO) == (
        pytest.approx(expected, rel=1e-5)
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss", [PPO, PLAIN], ids=lambda loss: loss.name)
async def test_a_ratio_beyond_all_bounds_leaves_numbers_numbers(
    advantage: float, loss: LossConfig
) -> None:
    coin = Coin(0.5)
    trainer = LocalTrainer(HandMade(coin, 2))
    metrics = await trainer.forward_backward([row_of([0], [0], [-500.0], advantage)], loss)
    assert all(map(math.isfinite, metrics.values()))
    assert coin.theta.grad is not None
    assert math.isfinite(coin.theta.grad.item())


async def test_temperature_divides_the_gradient() -> None:
    coin = Coin(0.3)
    half = Sampling(temperature=0.5)
    p = 1 / (1 + math.exp(-coin.theta.item() / 0.5))
    row = row_of([0], [0], [math.log(p)], 1.0, sampling=half)
    assert await slope(coin, [row], PPO) == pytest.approx(-(1 - p) / 0.5, rel=1e-5)


async def test_a_grpo_step_moves_the_policy_by_the_adam_update() -> None:
    coin = Coin(0.3)
    theta = coin.theta.item()
    trajectories = []
    for index, (side, reward) in enumerate([(0, 1.0), (1, 0.0), (1, 0.0), (0, 1.0)]):
        talk = Conversation(f"r{index}")
        talk.call([0], generation([side], [math.log(0.3 if side == 0 else 0.7)]))
        trajectories.append(talk.ended(reward))
    credits = await GRPO(AlgorithmConfig()).credit([trajectories], [])
    rows = normalize(build_rows(credits).rows, PPO, rollouts=1)
    policy = HandMade(coin, 2)
    trainer = LocalTrainer(policy)
    metrics = await trainer.forward_backward(rows, PPO)
    # Advantages are 1/2 for 0 and -1/2 for 1; half the tokens are each; weights are 1/4.
    gradient = -0.5 * (0.5 * 0.7 + 0.5 * 0.3)
    assert metrics["loss"] == pytest.approx(0, abs=1e-6)
    adam = AdamStep(lr=0.1, eps=0.05)
    metrics = await trainer.optim_step(adam)
    assert metrics["grad_norm"] == pytest.approx(abs(gradient), rel=1e-5)
    # Both averages are unbiased at the first step: the gradient over its own size.
    moved = theta - 0.1 * gradient / (abs(gradient) + 0.05)
    assert coin.theta.item() == pytest.approx(moved, rel=1e-5)
    assert coin.p > 0.3
    assert policy.version == 1


async def test_the_second_step_is_adams_too_and_decay_and_clipping_are_his() -> None:
    coin = Coin(0.3)
    adam = AdamStep(lr=0.05, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
    trainer = LocalTrainer(HandMade(coin, 2))
    m = v = 0.0
    theta = coin.theta.item()
    for step in (1, 2):
        p = coin.p
        await trainer.forward_backward([toss(coin, 0, 2.0 / step)], PLAIN)
        g = -2.0 / step * (1 - p)
        g *= min(1.0, 0.5 / abs(g))
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        step_size = (m / (1 - 0.8**step)) / (math.sqrt(v / (1 - 0.9**step)) + 1e-6)
        theta = theta * (1 - 0.05 * 0.1) - 0.05 * step_size
        await trainer.optim_step(adam)
        assert coin.theta.item() == pytest.approx(theta, rel=1e-4)


# --------------------------------------------------------------------------- against plain passes


def plain_loss(policy: LocalPolicy, rows: Sequence[Row], loss: LossConfig) -> Tensor:
    """The loss of rows that are padded and computed as one batch, all logits at once."""
    longest = max(len(row.tokens) for row in rows)
    ids_BT = torch.tensor([[*row.tokens, *[0] * (longest - len(row.tokens))] for row in rows])
    seen_BT = torch.tensor(
        [[1] * len(row.tokens) + [0] * (longest - len(row.tokens)) for row in rows]
    )

    def everything() -> Tensor:
        return policy.model(input_ids=ids_BT, attention_mask=seen_BT, use_cache=False).logits

    logits_BTV = before_BTV = everything()
    with torch.no_grad():
        if loss.kl:
            with policy.use_reference():
                before_BTV = everything()
    total = torch.zeros(())
    for index, row in enumerate(rows):
        drifts: list[Tensor] = []
        for span in row.segments:
            setting = [(span.temperature, span.top_p, span.top_k)] * len(span.logprobs)
            transform = SamplingTransform.from_settings(setting, "cpu")
            where = slice(span.start - 1, span.end - 1)
            target_T = torch.tensor(row.tokens[span.start : span.end])

            def chosen(logits_TV: Tensor) -> Tensor:
                logp_TV = compute_log_probs(logits_TV, transform)  # noqa: B023
                return logp_TV.gather(1, target_T[:, None])[:, 0]  # noqa: B023

            logp_T = chosen(logits_BTV[index, where])
            drift_T = logp_T - torch.tensor(span.logprobs)
            drifts.append(drift_T)
            advantage_T = torch.tensor(span.advantages)
            low, high = loss.clip_range
            ratio_T = drift_T.exp()
            gain_T = (ratio_T * advantage_T).minimum(ratio_T.clamp(low, high) * advantage_T)
            gain_T = gain_T.where(advantage_T >= 0, gain_T.maximum(3 * advantage_T))
            total = total - span.weight * gain_T.sum()
            if loss.kl:
                gap_T = chosen(before_BTV[index, where]) - logp_T
                total = total + loss.kl * span.weight * (gap_T.exp() - gap_T - 1).sum()
            if loss.entropy:
                logp_TV = compute_log_probs(logits_BTV[index, where], transform)
                total = total + loss.entropy * span.weight * (logp_TV.exp() * logp_TV).sum()
    return total


@st.composite
def families(draw: st.DrawFn) -> list[Row]:
    """Rows that share prefixes, some wholly, with spans of other settings and advantages."""
    rows: list[Row] = []
    for index in range(draw(st.integers(1, 6))):
        stem = draw(st.sampled_from([0, *(len(row.tokens) for row in rows)]))
        known = draw(st.sampled_from(rows)).tokens[:stem] if rows else ()
        fresh = draw(st.lists(st.integers(0, 299), min_size=2, max_size=30))
        tokens = [*known, *fresh]
        start = draw(st.integers(1, len(tokens) - 1))
        sampling = Sampling(temperature=draw(st.sampled_from([0.7, 1.0, 1.3])))
        logprobs = draw(
            st.lists(
                st.floats(-8, -3, width=32),
                min_size=len(tokens) - start,
                max_size=len(tokens) - start,
            )
        )
        rows.append(
            row_of(
                tokens[:start],
                tokens[start:],
                logprobs,
                draw(st.floats(-1, 1, width=32)),
                weight=0.1,
                sampling=sampling,
                generation=f"c{index}.0",
            )
        )
    return rows


def gradients_of(policy: LocalPolicy, loss: Tensor) -> dict[str, Tensor]:
    weights = policy.get_trainable()
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def found_gradients(policy: LocalPolicy) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in policy.get_trainable().items()}
    return {name: grad for name, grad in grads.items() if grad is not None}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], atol=1e-5, rtol=1e-4), name


@given(
    families(),
    st.sampled_from([64, 100, 2048]),
    st.sampled_from(["lora", "full"]),
    st.booleans(),
    st.sampled_from([PPO, LossConfig(kl=0.3, entropy=0.1)]),
)
@settings(max_examples=25)
def test_packed_gradients_are_those_of_padded_rows(
    tiny_folder: Path, rows: list[Row], most: int, weights: str, again: bool, loss: LossConfig
) -> None:
    policy = load(
        tiny_folder,
        micro_batch_tokens=most,
        weights=weights,
        gradient_checkpointing=again,
        keep_reference=True,
    )
    nudge(policy, size=0.1 if weights == "lora" else 0.01)
    expected = plain_loss(policy, rows, loss)
    wanted = gradients_of(policy, expected)
    metrics = anyio.run(LocalTrainer(policy, threads=1).forward_backward, rows, loss)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert_close(found_gradients(policy), wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler itself looks at
async def test_compiled_layers_have_the_same_gradients(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What machine code becomes of a graph is the compiler's affair; the graph is ours.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    rows = await sampled(load(tiny_folder, weights="full"))
    found: list[dict[str, Tensor]] = []
    for compile in (False, True):
        policy = load(tiny_folder, weights="full", compile=compile)
        await LocalTrainer(policy, threads=1).forward_backward(rows, PPO)
        found.append(found_gradients(policy))
    assert_close(*found)
    await sampled(policy)  # which no compiled layer takes part in


def by_loop(
    query_LHD: Tensor, key_MHD: Tensor, value_MHD: Tensor, branches: Branches, scale: float | None
) -> Tensor:
    """Attention as the flash kernel computes it, one branch at a time."""
    outs: list[Tensor] = []
    query_ends, key_ends = branches.query_ends.tolist(), branches.key_ends.tolist()
    for branch in range(len(query_ends) - 1):
        query = query_LHD[query_ends[branch] : query_ends[branch + 1]].transpose(0, 1)
        span = slice(key_ends[branch], key_ends[branch + 1])
        key, value = (x[span].transpose(0, 1) for x in (key_MHD, value_MHD))
        assert query.shape[1] <= branches.max_queries
        assert key.shape[1] <= branches.max_keys
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool)
        mask = mask.tril(diagonal=key.shape[1] - query.shape[1])
        out = nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@given(families())
@settings(max_examples=15)
def test_attention_over_branches_equals_attention_with_a_mask(
    tiny_folder: Path, rows: list[Row]
) -> None:
    policy = load(tiny_folder)
    [tree] = pack(rows, 10_000, enough=10_000)
    cpu = torch.device("cpu")
    inputs = {
        "input_ids": torch.from_numpy(tree.tokens)[None],
        "position_ids": torch.from_numpy(tree.depth)[None],
        "use_cache": False,
    }
    masked = policy.body(
        **inputs, attention_mask=tree.build_mask(cpu)[None, None]
    ).last_hidden_state
    branched = policy.body(
        **inputs,
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
        branches=tree.build_branches(cpu),
        kernel=by_loop,
    ).last_hidden_state
    assert (masked - branched).abs().max() < 1e-5
    assert_close(*(gradients_of(policy, hidden.square().mean()) for hidden in (masked, branched)))


async def sampled(policy: LocalPolicy, **sampling: Any) -> list[Row]:
    """Sample answers with the engine, as rows."""
    engine = LocalEngine(policy, LocalEngineConfig(), decode, threads=1)
    rows: list[Row] = []
    for index in range(4):
        prompt = prompt_of(20, seed=index // 2)
        answer = await ask(engine, prompt, seed=index, max_tokens=12, **sampling)
        advantage = (-1.0) ** index
        rows.append(
            row_of(
                prompt,
                answer.tokens,
                answer.logprobs,
                advantage,
                weight=1 / 48,
                version=policy.version,
                sampling=Sampling.model_validate(sampling),
            )
        )
    await engine.close()
    return rows


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 0},
        {"top_k": 30},
        {"temperature": 1.2, "top_p": 0.9},
    ],
    ids=str,
)
async def test_what_the_engine_sampled_is_on_policy(
    tiny_folder: Path, sampling: dict[str, float]
) -> None:
    policy = load(tiny_folder)
    nudge(policy, size=0.1)
    rows = await sampled(policy, **sampling)
    metrics = await LocalTrainer(policy, threads=1).forward_backward(rows, PPO)
    assert metrics["logprob_gap"] < 1e-5
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-7)
    assert metrics["clip_fraction"] == 0
    assert metrics["staleness"] == 0
    assert metrics["loss"] == pytest.approx(0, abs=1e-5), "a mean of advantages that cancel"
    assert metrics["trained_tokens"] == 48
    assert metrics["computed_tokens"] <= 2 * 20 + 48, "the shared prompts are computed once"


@pytest.mark.parametrize("weights", ["lora", "full"])
async def test_in_bf16_sampler_and_trainer_nearly_agree(tiny_folder: Path, weights: str) -> None:
    policy = load(tiny_folder, weights=weights, precision="bf16")
    nudge(policy, size=0.1 if weights == "lora" else 0.01)
    rows = await sampled(policy)
    metrics = await LocalTrainer(policy, threads=1).forward_backward(rows, PPO)
    assert metrics["logprob_gap"] < 0.02


async def test_steps_too_small_for_bf16_add_up_in_fp32() -> None:
    coin = Coin(1 / (1 + math.exp(-1)))  # theta is 1, and the next number 1 + 1/128
    coin.to(torch.bfloat16)
    trainer = LocalTrainer(HandMade(coin, 2))
    moved = []
    for _ in range(60):
        await trainer.forward_backward([row_of([0], [0], [-0.3], 1.0)], PLAIN)
        await trainer.optim_step(AdamStep(lr=1e-4))
        moved.append(coin.theta.item() - 1)
    assert moved[:30] == [0.0] * 30
    assert moved[-1] == 1 / 128


async def test_a_sampled_token_just_past_the_edge_of_top_p_is_kept(tiny_folder: Path) -> None:
    policy = load(tiny_folder)
    rows = [
        row_of([1, 2], [token], [-1.0], 1.0, sampling=Sampling(top_k=1)) for token in range(5, 9)
    ]
    trainer = LocalTrainer(policy, threads=1)
    metrics = await trainer.forward_backward(rows, PPO)
    assert all(map(math.isfinite, metrics.values()))
    assert math.isfinite((await trainer.optim_step(ADAM))["grad_norm"])


async def test_recomputed_log_probabilities_are_those_of_a_plain_pass(tiny_folder: Path) -> None:
    policy = load(tiny_folder, micro_batch_tokens=64)
    nudge(policy, size=0.1)
    hot = Sampling(temperature=1.3)
    sequences = [([1, 2, 3], [4, 5], hot), ([9], [8, 7, 6], Sampling()), ([1, 2, 3], [4], hot)]
    rows = [row_of(p, t, [-1.0] * len(t), 1.0, sampling=s) for p, t, s in sequences]
    found = await LocalTrainer(policy, threads=1).recompute_logprobs(rows)
    for row, before, (prompt, tokens, sampling) in zip(found, rows, sequences, strict=True):
        [segment] = row.segments
        assert segment.old_logprobs == pytest.approx(
            plain_logprobs(policy, prompt, tokens, sampling), abs=1e-5
        )
        assert replace(segment, old_logprobs=None) == before.segments[0]


async def test_a_second_update_is_clipped_by_its_ratio_to_the_policy_of_the_step() -> None:
    # The sampler rounds: it reports half of the probability that the trainer finds.
    coin = Coin(0.3)
    rows = [toss(coin, 0, 1.0, ratio=2.0)]
    trainer = LocalTrainer(HandMade(coin, 2))
    loss = LossConfig(old_logprobs="recomputed", correction="token_truncate", correction_max=1.5)
    old = await trainer.recompute_logprobs(rows)
    # On policy the ratio is 1 and the weight 1.5, not 2; d log p(0) = 1 - p.
    assert await slope(coin, old, loss) == pytest.approx(-1.5 * 0.7, rel=1e-5)
    assert (await trainer.forward_backward(old, loss))["corrected_fraction"] == 1
    with torch.no_grad():
        coin.theta.add_(1.0)  # p(0) = 0.538, beyond the clip of 0.3 * 1.28
    assert await slope(coin, old, loss) == 0


async def test_entropy_is_that_of_the_sampled_distribution() -> None:
    coin = Coin(0.3)
    rows = [toss(coin, 0, 1.0), row_of([0], [1], [0.0], 1.0, sampling=Sampling(top_k=1))]
    metrics = await LocalTrainer(HandMade(coin, 2)).forward_backward(rows, PPO)
    certain, open_ = 0.0, -0.3 * math.log(0.3) - 0.7 * math.log(0.7)
    assert metrics["entropy"] == pytest.approx((open_ + certain) / 2, rel=1e-5)


async def test_staleness_counts_versions_however_large() -> None:
    coin = Coin(0.3)
    policy = HandMade(coin, 2)
    policy.version = 2**24 + 3
    row = row_of([0], [0], [-1.0], 1.0, version=2**24 + 1)
    metrics = await LocalTrainer(policy).forward_backward([row], PPO)
    assert metrics["staleness"] == 2


# --------------------------------------------------------------------------- failures


def values(policy: LocalPolicy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.get_trainable().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


GOOD = [row_of([1, 2, 3], [4, 5], [-5.0, -5.0], 1.0), row_of([1, 2, 9], [8], [-6.0], -1.0)]


async def test_a_refused_row_leaves_weights_and_gradient_alone(tiny_folder: Path) -> None:
    policy, fresh = load(tiny_folder), load(tiny_folder)
    before = values(policy)
    trainer = LocalTrainer(policy, threads=1)
    for bad in (math.nan, math.inf):
        with pytest.raises(TrainerError, match=r"c\.0"):
            await trainer.forward_backward([*GOOD, row_of([1], [2], [-1.0], bad)], PPO)
    with pytest.raises(TrainerError, match="context"):
        await trainer.forward_backward([*GOOD, row_of([], [2], [-1.0], 1.0)], PPO)
    assert_same(values(policy), before)
    assert policy.version == 0
    for one in (trainer, LocalTrainer(fresh, threads=1)):
        await one.forward_backward(GOOD, PPO)
        await one.optim_step(ADAM)
    assert_same(values(policy), values(fresh))


async def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    coin = Coin(0.3)
    policy = HandMade(coin, 2)
    trainer = LocalTrainer(policy)
    before = coin.theta.item()
    await trainer.forward_backward([toss(coin, 0, 1.0)], PPO)
    assert coin.theta.grad is not None
    coin.theta.grad.fill_(math.nan)
    with pytest.raises(NonFiniteUpdate, match="nothing was changed"):
        await trainer.optim_step(ADAM)
    assert coin.theta.item() == before
    assert policy.version == 0
    await trainer.forward_backward([toss(coin, 0, 1.0)], PPO)
    await trainer.optim_step(ADAM)
    assert coin.theta.item() > before


async def test_logits_that_are_no_numbers_are_an_error_and_no_gradient() -> None:
    coin = Coin(0.3)
    rows = [toss(coin, 0, 1.0)]
    with torch.no_grad():
        coin.theta.fill_(math.nan)
    with pytest.raises(NonFiniteUpdate, match="logits are not finite"):
        await LocalTrainer(HandMade(coin, 2)).forward_backward(rows, PPO)
    assert coin.theta.grad is None


async def test_an_advantage_that_overflows_is_not_blamed_on_the_model() -> None:
    coin = Coin(0.3)
    trainer = LocalTrainer(HandMade(coin, 2))
    with pytest.raises(NonFiniteUpdate, match="loss is -inf: advantages are too large"):
        await trainer.forward_backward([toss(coin, 0, 3e38, weight=10.0)], PPO)
    with pytest.raises(NonFiniteUpdate, match="that is not finite"):
        await trainer.forward_backward([toss(coin, 0, 1e39)], PPO)
    assert coin.theta.grad is None


class Narrow(nn.Module):
    """A coin for which more than so many tokens at once are too many."""

    def __init__(self, coin: Coin, most: int) -> None:
        super().__init__()
        self.coin = coin
        self.most = most
        self.passes: list[int] = []

    def forward(self, input_ids: Tensor, logits_to_keep: Tensor, **_: object) -> object:
        self.passes.append(input_ids.shape[1])
        if input_ids.shape[1] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.")
        return self.coin(input_ids, logits_to_keep)


def tosses(coin: Coin, count: int) -> list[Row]:
    """Rows of 20 tokens that share nothing."""
    return [
        row_of([index % 2] * (index + 1) + [1 - index % 2] * (18 - index), [0], [-1.0], 1.0)
        for index in range(count)
    ]


async def test_when_memory_runs_out_passes_get_smaller_and_nothing_is_lost() -> None:
    coin = Coin(0.3)
    rows = tosses(coin, 12)
    whole = LocalTrainer(HandMade(coin, 2, micro_batch_tokens=2000))
    wanted = await whole.forward_backward(rows, PPO)
    assert coin.theta.grad is not None
    slope_there = coin.theta.grad.item()
    coin.theta.grad = None
    narrow = Narrow(coin, 100)
    trainer = LocalTrainer(HandMade(narrow, 2, micro_batch_tokens=2000))
    found = await trainer.forward_backward(rows, PPO)
    again: Tensor | None = coin.theta.grad
    assert again is not None
    assert again.item() == pytest.approx(slope_there)
    assert found["loss"] == pytest.approx(wanted["loss"])
    assert found["trained_tokens"] == 12
    assert len([size for size in narrow.passes if size > 100]) <= 2, "it does not try in vain"
    narrow.passes.clear()
    await trainer.forward_backward(rows, PPO)
    assert max(narrow.passes) <= 100, "it remembers"


class TooLarge(Tensor):
    """A gradient for which there is no memory in fp32."""

    def float(self, *args: object, **settings: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.")


def test_a_gradient_is_accumulated_wholly_or_not_at_all(tiny_folder: Path) -> None:
    policy = load(tiny_folder, precision="bf16")
    weights = MasterWeights(policy)
    gradient = [torch.ones_like(weight) for weight in policy.get_trainable().values()]
    with pytest.raises(torch.OutOfMemoryError):
        weights.accumulate([*gradient[:-1], gradient[-1].as_subclass(TooLarge)])
    assert weights.get_accumulated() == [None] * len(gradient)
    weights.accumulate([None, *gradient[1:]])
    weights.accumulate(gradient)
    sums = [0.0 if grad is None else grad.mean().item() for grad in weights.get_accumulated()]
    assert sums == [1.0] + [2.0] * (len(gradient) - 1)


async def test_a_row_that_does_not_fit_at_all_is_one_line_and_changes_nothing() -> None:
    coin = Coin(0.3)
    trainer = LocalTrainer(HandMade(Narrow(coin, 10), 2))
    with pytest.raises(TrainerError, match=r"gradient_checkpointing.*nothing was changed") as error:
        await trainer.forward_backward(tosses(coin, 3), PPO)
    assert "\n" not in str(error.value)
    assert coin.theta.grad is None


# --------------------------------------------------------------------------- checkpoints, exports


async def steps(
    trainer: LocalTrainer, count: int, first: int = 0, adam: AdamConfig = CONSTANT
) -> None:
    for index in range(first, first + count):
        prompt = prompt_of(10, seed=index)
        rows = [
            row_of(prompt, prompt_of(6, seed=9 + side), [-5.0] * 6, float(side)) for side in (-1, 1)
        ]
        await trainer.forward_backward(rows, PPO)
        await trainer.optim_step(adam.build_step(index, 5, "lora"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["lora", "full"])
async def test_after_any_step_a_restore_goes_on_bit_for_bit(
    tiny_folder: Path, tmp_path: Path, weights: str, precision: str
) -> None:
    falling = AdamConfig(lr=1e-2, schedule="cosine", warmup_steps=1)
    settings: Any = {"weights": weights, "precision": precision}
    through = load(tiny_folder, **settings)
    trainer = LocalTrainer(through, threads=1)
    for step in range(5):
        await trainer.save(tmp_path / str(step))
        await steps(trainer, 1, first=step, adam=falling)
    for step in range(5):
        resumed = load(tiny_folder, seed=9, **settings)
        other = LocalTrainer(resumed, threads=1)
        await other.restore(tmp_path / str(step))
        await steps(other, 5 - step, first=step, adam=falling)
        assert_same(values(through), values(resumed))


@pytest.mark.parametrize("weights", ["lora", "full"])
async def test_training_after_a_restore_is_training_without_one_bit_for_bit(
    tiny_folder: Path, tmp_path: Path, weights: str
) -> None:
    through, resumed = load(tiny_folder, weights=weights), load(tiny_folder, 5, weights=weights)
    one = LocalTrainer(through, threads=1)
    await steps(one, 2)
    await one.save(tmp_path / "two")
    await steps(one, 2, first=2)
    other = LocalTrainer(resumed, threads=1)
    await steps(other, 1, first=7)  # what it did before is forgotten
    await other.forward_backward(GOOD, PPO)
    await other.restore(tmp_path / "two")
    shutil.rmtree(tmp_path / "two")
    await steps(other, 2, first=2)
    assert_same(values(through), values(resumed))
    assert through.version == resumed.version == 4


async def test_a_checkpoint_of_the_beginning_forgets_the_optimizer(
    tiny_folder: Path, tmp_path: Path
) -> None:
    fresh, policy = load(tiny_folder), load(tiny_folder)
    trainer = LocalTrainer(policy, threads=1)
    await trainer.save(tmp_path / "zero")
    await steps(trainer, 2)
    before = policy.revision
    await trainer.restore(tmp_path / "zero")
    assert policy.revision > before, "the engine must drop its KV cache"
    await steps(trainer, 1)
    await steps(LocalTrainer(fresh, threads=1), 1)
    assert_same(values(policy), values(fresh))


@pytest.mark.parametrize("other", ["model", "rank", "weights"])
async def test_a_checkpoint_of_something_else_is_refused(
    tiny_folder: Path, tmp_path: Path, other: str
) -> None:
    policy = load(tiny_folder)
    before = values(policy)
    if other == "model":
        stranger = load(make_model(tmp_path / "model", layers=3))
    else:
        changes: dict[str, Any] = {"rank": {"lora_rank": 2}, "weights": {"weights": "full"}}
        stranger = load(tiny_folder, **changes[other])
    await LocalTrainer(stranger, threads=1).save(tmp_path / "one")
    with pytest.raises(TrainerError, match="another model or other trainer settings"):
        await LocalTrainer(policy, threads=1).restore(tmp_path / "one")
    assert_same(values(policy), before)


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors"])
async def test_a_checkpoint_with_a_flipped_bit_is_refused_before_anything_changes(
    tiny_folder: Path, tmp_path: Path, file: str
) -> None:
    policy = load(tiny_folder)
    trainer = LocalTrainer(policy, threads=1)
    await steps(trainer, 1)
    await trainer.save(tmp_path / "one")
    await trainer.restore(tmp_path / "one")
    before = values(policy)
    content = bytearray((tmp_path / "one" / file).read_bytes())
    content[-1] ^= 1
    (tmp_path / "one" / file).write_bytes(content)
    for load_again in (trainer.restore, trainer.start_from):
        with pytest.raises(TrainerError, match=f"damaged: '{file}'"):
            await load_again(tmp_path / "one")
    assert_same(values(policy), before)


async def test_a_checkpoint_without_checksums_is_refused_with_what_to_do(
    tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = LocalTrainer(load(tiny_folder), threads=1)
    await trainer.save(tmp_path / "one")
    (tmp_path / "one" / "state.json").write_text('{"version": 0}')
    with pytest.raises(TrainerError, match="an older version of whet wrote it, train again"):
        await trainer.restore(tmp_path / "one")


async def test_half_an_optimizer_is_refused_before_anything_changes(
    tiny_folder: Path, tmp_path: Path
) -> None:
    policy = load(tiny_folder)
    trainer = LocalTrainer(policy, threads=1)
    await steps(trainer, 1)
    await trainer.save(tmp_path / "one")
    await steps(trainer, 1)
    before = values(policy)
    drop_a_moment(tmp_path / "one" / "optimizer.safetensors")
    with pytest.raises(TrainerError, match="one"):
        await trainer.restore(tmp_path / "one")
    assert_same(values(policy), before)


def drop_a_moment(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    moments = load_file(path)
    del moments[next(name for name in moments if name.endswith("/exp_avg"))]
    save_file(moments, path)
    state = json.loads((path.parent / STATE).read_text())
    state["crc32"][path.name] = compute_checksum(path)
    (path.parent / STATE).write_text(json.dumps(state))


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt_of(30)])).logits


def test_a_fresh_adapter_changes_nothing(tiny_folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    assert torch.equal(logits(load(tiny_folder).model), logits(base))


def test_the_seed_of_new_weights_is_theirs_alone(tiny_folder: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one, same, other = load(tiny_folder, 3), load(tiny_folder, 3), load(tiny_folder, 4)
    assert torch.equal(torch.rand(3), expected)
    assert_same(values(one), values(same))
    assert any(not torch.equal(values(one)[name], value) for name, value in values(other).items())


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
async def test_an_exported_adapter_is_loaded_by_peft(tiny_folder: Path, tmp_path: Path) -> None:
    policy = load(tiny_folder)
    trainer = LocalTrainer(policy, threads=1)
    await steps(trainer, 2)
    await trainer.export(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.equal(logits(adapted), logits(policy.model))
    untouched = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    assert not torch.equal(logits(untouched), logits(policy.model))


async def test_exported_weights_are_loaded_by_transformers(
    tiny_folder: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    (model / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    policy = load(model, weights="full")
    trainer = LocalTrainer(policy, threads=1)
    await steps(trainer, 2)
    await trainer.export(tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(policy.model))
    assert (tmp_path / "exported" / "tokenizer.json").exists()
    assert (tmp_path / "exported" / "chat_template.jinja").exists()


async def test_a_step_makes_good_tokens_more_probable(tiny_folder: Path) -> None:
    policy = load(tiny_folder)
    nudge(policy, size=0.1)
    rows = await sampled(policy)

    def likelihood(row: Row) -> float:
        [span] = row.segments
        cut = span.start
        return sum(plain_logprobs(policy, row.tokens[:cut], row.tokens[cut:], Sampling()))

    before = [likelihood(row) for row in rows]
    trainer = LocalTrainer(policy, threads=1)
    await trainer.forward_backward(rows, PPO)
    await trainer.optim_step(AdamStep(lr=1e-3))
    gains = [likelihood(row) - old for row, old in zip(rows, before, strict=True)]
    assert gains[0] + gains[2] > 0 > gains[1] + gains[3]


async def test_adapters_on_the_head_alone_are_trained(tiny_folder: Path) -> None:
    policy = load(tiny_folder, lora_layers=["head"])
    trainer = LocalTrainer(policy)
    row = row_of([5, 6, 7], [8, 9], [-7.0, -7.0], 1.0)
    await trainer.forward_backward([row], LossConfig(name="cross_entropy"))
    assert (await trainer.optim_step(AdamStep()))["grad_norm"] > 0


# --------------------------------------------------------------------------- 8-bit moments


def test_8_bit_moments_without_their_library_are_refused_in_one_line(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"'adamw_8bit' needs bitsandbytes .*pip install"):
        LocalTrainer(load(tiny_folder, optimizer="adamw_8bit"))


async def test_8_bit_moments_learn_nearly_the_same_and_are_restored(
    tiny_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    policies = [load(tiny_folder, weights="full", optimizer=o) for o in ("adamw", "adamw_8bit")]
    before = values(policies[0])
    _, trainer = trainers = [LocalTrainer(policy, threads=1) for policy in policies]
    for one in trainers:
        for _ in range(3):
            await one.forward_backward(GOOD, PPO)
            await one.optim_step(ADAM)
    exact, quantized = map(values, policies)
    for name in exact:
        moved, differs = exact[name] - before[name], quantized[name] - exact[name]
        assert differs.norm() <= 0.2 * moved.norm(), name

    await trainer.save(tmp_path / "checkpoint")
    again = load(tiny_folder, weights="full", optimizer="adamw_8bit")
    restored = LocalTrainer(again, threads=1)
    await restored.restore(tmp_path / "checkpoint")
    for one in (trainer, restored):
        await one.forward_backward(GOOD, PPO)
        await one.optim_step(ADAM)
    assert_same(values(policies[1]), values(again))
