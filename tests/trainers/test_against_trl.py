"""The losses against TRL's own code on the same tensors.

TRL's trainer needs libraries we do not install; its loss is one method, which is taken out of its
file as it stands and run on tensors.
"""

import ast
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.store.trajectories import Conversation, generation
from whet.config import LossConfig
from whet.trainers.logprobs import PolicyScores
from whet.trainers.loss import compute_ratios, compute_total_loss
from whet.trainers.packing import Batch, pack
from whet.training.rows import build_rows, normalize
from whet.types import Credit

LENGTHS = [5, 2, 7, 1]
ADVANTAGES = [1.0, -0.5, 0.25, -2.0]
LONGEST = max(LENGTHS)


def _compute_loss() -> Callable[..., Tensor]:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("trainer").joinpath("grpo_trainer.py").read_text())
    [method] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "_compute_loss"
    ]
    names: dict[str, Any] = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    exec(compile(ast.Module([method], []), "grpo_trainer.py", "exec"), names)
    return names["_compute_loss"]


TRL = _compute_loss()


def trl(
    logp_BT: Tensor,
    old_BT: Tensor,
    mask_BT: Tensor,
    ref_BT: Tensor,
    ent_BT: Tensor,
    *,
    weight_BT: Tensor | None = None,
    **own: object,
) -> Tensor:
    """The loss of TRL's trainer; `weight_BT` are its importance weights of a vLLM server."""
    settings: dict[str, Any] = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "entropy_coef": 0.0,
    } | own
    trainer = SimpleNamespace(
        **settings,
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp_BT, ent_BT, None),
        args=SimpleNamespace(
            delta=settings.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=1
        ),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=weight_BT is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        _metrics={"train": defaultdict(list)},
    )
    trainer.accelerator.sync_gradients = True
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask_BT, dtype=torch.long),
        "completion_mask": mask_BT,
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": old_BT,
        "ref_per_token_logps": ref_BT,
        "num_items_in_batch": mask_BT.sum().float(),
        "importance_sampling_ratio": weight_BT,
    }
    return TRL(trainer, None, inputs)


def ours(
    logp_BT: Tensor,
    sampled_BT: Tensor,
    ref_BT: Tensor,
    ent_BT: Tensor,
    *,
    old_BT: Tensor | None = None,
    **own: object,
) -> Tensor:
    """Our loss of them, from conversations to rows to the loss."""
    loss = LossConfig.model_validate(own)
    credits: list[Credit] = []
    for index, (length, advantage) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        talk = Conversation(f"r{index}")
        sampled = generation([index + 1] * length, sampled_BT[index, :length].tolist())
        talk.call([0], sampled)
        trajectory = talk.ended(0.0)
        credits.append(Credit(trajectory, {trajectory.calls[0].generation_id(0): advantage}))
    rows = normalize(build_rows(credits).rows, loss, rollouts=len(credits))
    [tree] = pack(rows, 1000)
    batch = Batch.from_tree(tree)

    def flat(x_BT: Tensor) -> Tensor:
        order = [int(row.rollout[1:]) for row, _ in tree.rows]
        return torch.cat([x_BT[index, : LENGTHS[index]] for index in order])

    if old_BT is not None:
        batch = replace(batch, old_N=flat(old_BT))
    scores = PolicyScores(flat(logp_BT), flat(ent_BT))
    reference_N = flat(ref_BT) if loss.kl else None
    return compute_total_loss(
        scores, compute_ratios(scores.logp_N, batch, loss), reference_N, batch, loss
    )


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"loss_type": "dapo"}, {"normalize": "token"}),
        ({"loss_type": "bnpo"}, {"normalize": "token"}),
        ({"loss_type": "grpo"}, {"normalize": "rollout"}),
        ({"loss_type": "dr_grpo"}, {"normalize": "constant", "tokens_per_rollout": LONGEST}),
        (
            {"loss_type": "grpo", "epsilon_low": 0.05, "epsilon_high": 0.1},
            {"normalize": "rollout", "clip_low": 0.05, "clip_high": 0.1},
        ),
        # Their bound is of the ratio itself, and there is none below.
        (
            {"loss_type": "cispo", "epsilon_high": 1.5},
            {"name": "cispo", "clip_low": 1.0, "clip_high": 0.5},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {"name": "gspo", "normalize": "rollout", "clip_low": 0.2, "clip_high": 0.28},
        ),
        ({"loss_type": "dapo", "delta": 1.4}, {"dual_clip": 1.4}),
        ({"loss_type": "dapo", "beta": 0.3}, {"kl": 0.3}),
        ({"loss_type": "bnpo", "entropy_coef": 0.2}, {"entropy": 0.2}),
    ],
    ids=str,
)
def test_value_and_gradient_are_trls(theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    old_BT, logp_BT, ref_BT, ent_BT = tensors()
    wanted = trl(logp_BT, old_BT, MASK_BT, ref_BT, ent_BT, **theirs)
    found = ours(logp_BT, old_BT, ref_BT, ent_BT, **mine)
    assert_equal(wanted, found, logp_BT, ent_BT)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_corrections_of_the_sampler_are_trls(loss_type: str, mode: str) -> None:
    old_BT, logp_BT, sampled_BT, ent_BT = tensors()
    # As TRL's _generate_and_score_completions makes them of the sampler's log-probabilities.
    gap_BT = (old_BT - sampled_BT) * MASK_BT
    log_weight_BT = gap_BT.sum(-1, keepdim=True) if mode.startswith("sequence") else gap_BT
    weight_BT = log_weight_BT.exp()
    if mode.endswith("truncate"):
        weight_BT = weight_BT.clamp(max=1.3)
    else:
        weight_BT = weight_BT.masked_fill((weight_BT < 0.8) | (weight_BT > 1.3), 0.0)
    theirs = {"loss_type": loss_type, "epsilon_high": 1.5 if loss_type == "cispo" else 0.28}
    mine = {"correction_min": 0.8} if mode.endswith("mask") else {}
    mine |= {"name": "cispo", "clip_high": 0.5} if loss_type == "cispo" else {}
    mine |= {"correction": mode, "correction_max": 1.3, "old_logprobs": "recomputed"}
    wanted = trl(logp_BT, old_BT, MASK_BT, old_BT, ent_BT, weight_BT=weight_BT, **theirs)
    found = ours(logp_BT, sampled_BT, old_BT, ent_BT, old_BT=old_BT, **mine)
    assert_equal(wanted, found, logp_BT, ent_BT)


MASK_BT = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).long()


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of old, current and another policy, and entropies."""
    random = torch.Generator().manual_seed(3)
    shape = len(LENGTHS), LONGEST
    old_BT = -3 * torch.rand(shape, generator=random)
    logp_BT = (old_BT + 0.4 * torch.randn(shape, generator=random)).requires_grad_()
    other_BT = old_BT + 0.4 * torch.randn(shape, generator=random)
    return old_BT, logp_BT, other_BT, torch.rand(shape, generator=random).requires_grad_()


def assert_equal(wanted: Tensor, found: Tensor, *leaves: Tensor) -> None:
    """Compare two losses and their gradients."""
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    for leaf in leaves:
        [wanted_BT] = torch.autograd.grad(
            wanted, leaf, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        [found_BT] = torch.autograd.grad(
            found, leaf, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        assert torch.allclose(found_BT, wanted_BT * MASK_BT, rtol=1e-4, atol=1e-7)
