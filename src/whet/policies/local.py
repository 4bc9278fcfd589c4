"""A Hugging Face model in this process: one copy of weights for the sampler and the trainer."""

import threading
from pathlib import Path
from typing import Literal, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from whet.config import TrainerConfig
from whet.errors import ConfigError, boundary


class LocalPolicy:
    """The weights and their version.

    The model is never put in training mode: dropout would make the trainer's log-probabilities
    differ from the sampler's. Whoever changes weights holds `lock` and raises `version` before
    letting it go; the engine holds it for each forward pass, so a token is always of one version.
    """

    def __init__(self, folder: Path, config: TrainerConfig, *, device: str, seed: int) -> None:
        self.folder = folder
        self.config = config
        self.device = torch.device(_pick_device(device))
        self.version = 0
        self.lock = threading.RLock()
        disable_progress_bar()  # a library draws none; whoever shows progress does it in app/
        with boundary(ConfigError, f"cannot load the model in {str(folder)!r}"):
            hf_config = cast(PretrainedConfig, AutoConfig.from_pretrained(folder))
            _refuse_partial_attention(hf_config)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="sdpa"
            )
        self.context_length = int(hf_config.max_position_embeddings)
        self.wrapped: nn.Module = model
        """What is saved: the PEFT model, or the model itself when all weights are trained."""
        if config.weights == "lora":
            torch.manual_seed(seed)
            lora = LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            )
            self.wrapped = get_peft_model(model, lora)
        self.model = cast(PreTrainedModel, model)
        """What is run: with LoRA, its linear layers have been replaced in place."""
        self.wrapped.to(self.device).eval()

    def trainable(self) -> dict[str, nn.Parameter]:
        """The weights training changes, by name."""
        return {n: p for n, p in self.wrapped.named_parameters() if p.requires_grad}


def _pick_device(device: str) -> Literal["cpu", "cuda"]:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is 'cuda' but torch finds no GPU: use 'cpu' or 'auto'")
    return "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda"


def _refuse_partial_attention(config: PretrainedConfig) -> None:
    """Slots of keys and values stand for whole contexts; other kinds of memory need other code."""
    kinds = set(config.to_dict().get("layer_types") or ["full_attention"])
    if kinds - {"full_attention"}:
        raise ConfigError(
            f"the local engine serves models with full attention in every layer; "
            f"{config.model_type!r} has {', '.join(sorted(kinds))}"
        )
