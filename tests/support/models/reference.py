"""The same numbers by plain torch, transformers and PEFT: one row at a time, without a cache."""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)  # more only get in each other's way on matrices this small


class Reference:
    """A model with adapters as other tools load them, trained by the book."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model: Any = plain
        if adapter is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
                self.model = peft.PeftModel.from_pretrained(plain, str(adapter), is_trainable=True)
        self.model.eval()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self._adam = torch.optim.AdamW(self.trained, lr=1.0) if adapter else None

    def logprobs(self, tokens: Sequence[int], targets: Any) -> Tensor:
        logp = self.model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
        wanted = torch.tensor(targets)
        return logp.gather(1, wanted.reshape(len(tokens), -1)).reshape(wanted.shape)

    def after(self, tokens: Sequence[int]) -> Tensor:
        """Log-probabilities of every token but the first."""
        return self.logprobs(tokens[:-1], tokens[1:])

    def loss(
        self, name: str, lp: Tensor, inputs: Mapping[str, Any], settings: Mapping[str, float]
    ) -> Tensor:
        """The documented formulas, word for word."""
        if name == "cross_entropy":
            return -(torch.tensor(inputs["weights"]) * lp).sum()
        q, a = torch.tensor(inputs["logprobs"]), torch.tensor(inputs["advantages"])
        ratio = (lp - q).exp()
        low, high = (
            torch.tensor(inputs.get(name, settings.get(name, 0.0)))
            for name in ("clip_low_threshold", "clip_high_threshold")
        )
        if name == "gspo":
            counted = torch.tensor(inputs["sequence_ratio_mask"]) != 0
            mean = (lp - q)[counted].mean().detach()
            ratio = (mean + lp - lp.detach()).exp()
        match name:
            case "importance_sampling":
                return -(ratio * a).sum()
            case "ppo" | "gspo":
                return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()
            case "cispo":
                return -(ratio.clamp(low, high).detach() * lp * a).sum()
            case "dro":
                return -(lp * a - settings["beta"] / 2 * (lp - q) ** 2).sum()
        raise AssertionError(name)

    def step(self, *, lr: float, clip: float = 0.0, **settings: float) -> float:
        assert self._adam is not None
        norm = torch.nn.utils.clip_grad_norm_(self.trained, clip or math.inf).item()
        for group in self._adam.param_groups:
            group.update(
                lr=lr,
                betas=(settings.get("beta1", 0.9), settings.get("beta2", 0.95)),
                eps=settings.get("eps", 1e-12),
                weight_decay=settings.get("weight_decay", 0.0),
            )
        self._adam.step()
        self._adam.zero_grad()
        return norm
