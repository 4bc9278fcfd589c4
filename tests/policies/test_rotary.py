from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from tiny_llama import load
from whet.policies.local import LocalPolicy
from whet.policies.rotary import own_pass, redirect

IDS = torch.arange(1, 9)[None]


def logits(policy: LocalPolicy) -> Tensor:
    with torch.no_grad():
        return policy.model(input_ids=IDS, use_cache=False).logits


def test_one_models_attention_turns_by_another_function_and_no_other_models(
    tiny_folder: Path,
) -> None:
    policy, other = load(tiny_folder), load(tiny_folder)
    before = logits(policy)
    turned: list[int] = []

    def half_as_far(*given: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = given
        turned.append(len(q))
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin / 2)

    for module in policy.model.modules():
        if (forward := own_pass(module)) is not None:
            redirect(module, forward, half_as_far)

    after = logits(policy)
    assert not torch.equal(after, before)
    assert torch.equal(logits(other), before)
    assert len(turned) == policy.model.config.num_hidden_layers
    twin = deepcopy(policy.model)
    for module in twin.modules():
        if own_pass(module) is not None:
            assert module.forward.__self__ is module
    with torch.no_grad():
        assert torch.equal(twin(input_ids=IDS, use_cache=False).logits, after)
