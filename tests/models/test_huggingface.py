"""The weights that engine and trainer share: reference, precision and refused models."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.models.tiny_llama import VOCABULARY, load, nudge, prompt_of
from whet.errors import ConfigError, TrainerError
from whet.models.huggingface import LocalPolicy


def logits(policy: LocalPolicy) -> Tensor:
    with torch.inference_mode():
        return policy.model(input_ids=torch.tensor([prompt_of(20)])).logits


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_the_reference_is_the_model_before_training(tiny_folder: Path, weights: str) -> None:
    policy = load(tiny_folder, weights=weights, keep_reference=True)
    before = logits(policy)
    nudge(policy)
    after = logits(policy)
    assert not torch.equal(before, after)
    with policy.use_reference():
        assert torch.equal(logits(policy), before)
    assert torch.equal(logits(policy), after)


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_the_reference_of_a_start_is_the_start(tiny_folder: Path, weights: str) -> None:
    policy = load(tiny_folder, weights=weights)
    nudge(policy)
    policy.keep_reference()
    start = logits(policy)
    nudge(policy)
    after = logits(policy)
    assert not torch.equal(start, after)
    with policy.use_reference():
        assert torch.equal(logits(policy), start)
    assert torch.equal(logits(policy), after)


def test_without_a_copy_full_weights_have_no_reference(tiny_folder: Path) -> None:
    policy = load(tiny_folder, weights="full")
    with pytest.raises(TrainerError, match="keep_reference was not called"), policy.use_reference():
        pass


def test_a_failure_in_the_reference_leaves_the_trained_weights(tiny_folder: Path) -> None:
    policy = load(tiny_folder, weights="full", keep_reference=True)
    nudge(policy)
    after = logits(policy)
    with pytest.raises(ValueError, match="oops"), policy.use_reference():
        raise ValueError("oops")
    assert torch.equal(logits(policy), after)


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_in_bf16_all_weights_are_and_logits_are_not(tiny_folder: Path, weights: str) -> None:
    policy = load(tiny_folder, weights=weights, precision="bf16")
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    assert logits(policy).dtype == torch.float32
    assert policy.head.vocabulary == VOCABULARY


def test_a_cpu_computes_in_fp32_by_default(tiny_folder: Path) -> None:
    assert {p.dtype for p in load(tiny_folder).model.parameters()} == {torch.float32}


def test_a_model_that_does_something_else_to_its_logits_is_refused(tiny_folder: Path) -> None:
    class Doubled(LocalPolicy):
        def _check_head(self) -> None:
            self.model.register_forward_hook(double)
            super()._check_head()

    def double(module: nn.Module, inputs: object, output: object) -> None:
        output.logits *= 2  # pyright: ignore[reportAttributeAccessIssue]

    from whet.config import LocalTrainerConfig

    with pytest.raises(ConfigError, match="post-processes its logits"):
        Doubled(tiny_folder, LocalTrainerConfig(), device="cpu", seed=0)
