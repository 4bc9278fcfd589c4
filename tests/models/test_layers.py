"""Replaced layers of transformers models."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from support.models.tiny_llama import load
from whet.models.huggingface import LocalPolicy
from whet.models.layers import find_rotary_forward, replace_rotary

IDS = torch.arange(1, 9)[None]


def logits(policy: LocalPolicy) -> Tensor:
    with torch.no_grad():
        return policy.model(input_ids=IDS, use_cache=False).logits


def test_the_rotary_function_is_replaced_in_one_model_and_no_other(
    tiny_folder: Path,
) -> None:
    policy, other = load(tiny_folder), load(tiny_folder)
    before = logits(policy)
    calls: list[int] = []

    def half_as_far(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = inputs
        calls.append(len(q))
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin / 2)

    for module in policy.model.modules():
        if (forward := find_rotary_forward(module)) is not None:
            replace_rotary(module, forward, half_as_far)

    after = logits(policy)
    assert not torch.equal(after, before)
    assert torch.equal(logits(other), before)
    config: Any = policy.model.config
    assert len(calls) == config.num_hidden_layers
    copy = deepcopy(policy.model)
    for module in copy.modules():
        if find_rotary_forward(module) is not None:
            assert getattr(module.forward, "__self__", None) is module
    with torch.no_grad():
        assert torch.equal(copy(input_ids=IDS, use_cache=False).logits, after)
