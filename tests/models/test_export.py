"""Exported models: what servers load is, bit for bit, what was trained."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.models.tiny_llama import load, nudge, prompt_of
from whet.config import LocalTrainerConfig
from whet.errors import EngineError
from whet.models.export import write_adapter, write_full
from whet.models.huggingface import LocalPolicy

IDS = torch.tensor([prompt_of(20)])


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS).logits


def test_an_adapter_is_one_that_peft_loads(tiny_folder: Path, tmp_path: Path) -> None:
    policy = load(tiny_folder)
    nudge(policy)
    policy.write_weights(tmp_path / "w.safetensors")
    write_adapter(tmp_path / "w.safetensors", tmp_path / "a", policy.config, base=tiny_folder)
    full = LocalTrainerConfig(weights="full")
    again = LocalPolicy(tiny_folder, full, device="cpu", seed=0, adapter=tmp_path / "a")
    assert torch.equal(logits(again.model), logits(policy.model))
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    layers = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert settings["target_modules"] == layers


def test_a_model_folder_is_one_that_transformers_loads(tiny_folder: Path, tmp_path: Path) -> None:
    policy = load(tiny_folder, weights="full")
    nudge(policy)
    policy.write_weights(tmp_path / "w.safetensors")
    write_full(tmp_path / "w.safetensors", tmp_path / "m", base=tiny_folder)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert torch.equal(logits(again), logits(policy.model))


def test_weights_that_are_gone_leave_nothing_half_made(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot write"):
        write_adapter(tmp_path / "none", tmp_path / "a", LocalTrainerConfig(), base=tmp_path)
    assert not (tmp_path / "a").exists()
