"""The trained weights in fp32, their gradient and their optimizer.

Where the model runs in fp32 they are the model's own; else the model has rounded copies of them.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from whet.config import AdamConfig
from whet.errors import TrainerError, boundary
from whet.policies.local import LocalPolicy

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class TrainedWeights:
    """What AdamW changes."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy
        self._run = policy.trainable()
        self._kept = {name: _in_fp32(parameter) for name, parameter in self._run.items()}
        # Fused: nothing is allocated in the middle of a step, so memory cannot run out there.
        self._adam = torch.optim.AdamW(self._kept.values(), lr=1.0, fused=True)

    def gradient(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """Of the loss, added to nothing yet."""
        return torch.autograd.grad(loss, list(self._run.values()), allow_unused=True)

    def add(self, gradient: Sequence[Tensor | None]) -> None:
        """Add a gradient to what is there."""
        for weight, grad in zip(self._kept.values(), gradient, strict=True):
            if grad is None:
                continue
            if weight.grad is None:
                weight.grad = grad.float()
            else:
                weight.grad += grad

    def drop_gradient(self) -> None:
        self._adam.zero_grad()

    def step(self, adam: AdamConfig) -> float:
        """Apply the gradient and clear it; returns its norm. Raises TrainerError if it has none."""
        norm = torch.nn.utils.clip_grad_norm_(self._kept.values(), adam.max_grad_norm).item()
        if not math.isfinite(norm):
            self.drop_gradient()
            raise TrainerError(
                f"the gradient's norm is {norm}: nothing was changed; "
                "a lower adam.lr or finite rewards may help"
            )
        for settings in self._adam.param_groups:
            settings.update(
                lr=adam.lr,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        with self._policy.changing(self._policy.version + 1):
            self._adam.step()
            self._show()
        self.drop_gradient()
        return norm

    def save(self, folder: Path) -> None:
        """Write weights and optimizer."""
        weights = {name: weight.detach() for name, weight in self._kept.items()}
        safetensors.save_file(weights, folder / WEIGHTS)
        moments = {
            f"{name}/{moment}": self._adam.state[weight][moment]
            for name, weight in self._kept.items()
            for moment in MOMENTS
            if weight in self._adam.state
        }
        safetensors.save_file(moments, folder / OPTIMIZER)

    def restore(self, folder: Path, version: int, *, optimizer: bool = True) -> None:
        """Take what `save` wrote, or with a new optimizer the weights alone.

        Raises:
            TrainerError: it does not fit; nothing was changed.
        """
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            weights = safetensors.load_file(folder / WEIGHTS)
            moments = safetensors.load_file(folder / OPTIMIZER) if optimizer else {}
            states = {
                name: {moment: moments[f"{name}/{moment}"].clone() for moment in MOMENTS}
                for name in weights
                if f"{name}/step" in moments
            }
        self._refuse_others(weights, folder)
        with self._policy.changing(version), torch.no_grad():
            self._adam.state.clear()
            self.drop_gradient()
            for name, weight in self._kept.items():
                weight.copy_(weights[name])
                if state := states.get(name):
                    device = weight.device
                    self._adam.state[weight] = {m: v.to(device) for m, v in state.items()}
            self._show()

    def _refuse_others(self, weights: dict[str, Tensor], folder: Path) -> None:
        found = {name: tuple(weight.shape) for name, weight in weights.items()}
        expected = {name: tuple(weight.shape) for name, weight in self._kept.items()}
        if found == expected:
            return
        odd = sorted({*found.items()} ^ {*expected.items()})[0][0]
        raise TrainerError(
            f"the checkpoint {str(folder)!r} is of another model or other trainer settings: "
            f"{odd!r} is {found.get(odd, 'not there')}, expected {expected.get(odd, 'none')}"
        )

    def _show(self) -> None:
        """Give the model what it runs with."""
        with torch.no_grad():
            for name, parameter in self._run.items():
                if parameter is not self._kept[name]:
                    parameter.copy_(self._kept[name])


def _in_fp32(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())
