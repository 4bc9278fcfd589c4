"""The losses against TRL's own code on the same tensors.

TRL's trainer needs libraries we do not install; its loss is one method, which is taken out of its
file as it stands and run on tensors.
"""

import ast
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trajectories import Conversation, generation
from whet.config import LossConfig
from whet.rows import build_rows, normalise
from whet.trainers.batch import Batch
from whet.trainers.loss import ratios, total
from whet.trainers.scoring import Scores
from whet.trainers.tree import pack
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
    logp_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, ref_BT: Tensor, ent_BT: Tensor, **own: object
) -> Tensor:
    """What TRL's trainer would say of these log-probabilities."""
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
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp_BT, ent_BT, None),  # pyright: ignore[reportUnknownLambdaType]
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
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
    }
    return TRL(trainer, None, inputs)


def ours(logp_BT: Tensor, old_BT: Tensor, ref_BT: Tensor, ent_BT: Tensor, **own: object) -> Tensor:
    """What we say of them, from conversations to rows to the loss."""
    loss = LossConfig.model_validate(own)
    credits: list[Credit] = []
    for index, (length, advantage) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        talk = Conversation(f"r{index}")
        sampled = generation([index + 1] * length, old_BT[index, :length].tolist())
        talk.call([0], sampled)
        trajectory = talk.ended(0.0)
        credits.append(Credit(trajectory, {trajectory.calls[0].generation_id(0): advantage}))
    rows = normalise(build_rows(credits).rows, loss)
    [tree] = pack(rows, 1000)
    batch = Batch.of(tree)

    def flat(x_BT: Tensor) -> Tensor:
        order = [int(row.rollout[1:]) for row, _ in tree.rows]
        return torch.cat([x_BT[index, : LENGTHS[index]] for index in order])

    scores = Scores(flat(logp_BT), flat(ent_BT))
    reference_N = flat(ref_BT) if loss.kl else None
    return total(scores, ratios(scores.logp_N, batch, loss), reference_N, batch, loss)


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"loss_type": "dapo"}, {"normalise": "token"}),
        ({"loss_type": "bnpo"}, {"normalise": "token"}),
        ({"loss_type": "grpo"}, {"normalise": "rollout"}),
        ({"loss_type": "dr_grpo"}, {"normalise": "constant", "tokens_per_rollout": LONGEST}),
        (
            {"loss_type": "grpo", "epsilon_low": 0.05, "epsilon_high": 0.1},
            {"normalise": "rollout", "clip_low": 0.05, "clip_high": 0.1},
        ),
        # Their bound is of the ratio itself, and there is none below.
        (
            {"loss_type": "cispo", "epsilon_high": 1.5},
            {"name": "cispo", "clip_low": 1.0, "clip_high": 0.5},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {"name": "gspo", "normalise": "rollout"},
        ),
        ({"loss_type": "dapo", "beta": 0.3}, {"kl": 0.3}),
        ({"loss_type": "bnpo", "entropy_coef": 0.2}, {"entropy": 0.2}),
    ],
    ids=str,
)
def test_value_and_gradient_are_trls(theirs: dict[str, object], mine: dict[str, object]) -> None:
    random = torch.Generator().manual_seed(3)
    shape = len(LENGTHS), LONGEST
    old_BT = -3 * torch.rand(shape, generator=random)
    logp_BT = (old_BT + 0.4 * torch.randn(shape, generator=random)).requires_grad_()
    ref_BT = old_BT + 0.4 * torch.randn(shape, generator=random)
    ent_BT = torch.rand(shape, generator=random).requires_grad_()
    mask_BT = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).long()

    wanted = trl(logp_BT, old_BT, mask_BT, ref_BT, ent_BT, **theirs)
    found = ours(logp_BT, old_BT, ref_BT, ent_BT, **mine)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    for leaf in (logp_BT, ent_BT):
        [wanted_BT] = torch.autograd.grad(
            wanted, leaf, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        [found_BT] = torch.autograd.grad(
            found, leaf, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        assert torch.allclose(found_BT, wanted_BT * mask_BT, rtol=1e-4, atol=1e-7)
