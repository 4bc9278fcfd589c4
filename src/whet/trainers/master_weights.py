"""Trained parameters in fp32, and their optimizer state."""

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from whet.config import AdamStep
from whet.errors import ConfigError, NonFiniteUpdate, TrainerError, boundary
from whet.models.export import parameter_name
from whet.models.huggingface import LocalPolicy

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
MOMENTS = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "adamw_8bit": {"step", "state1", "state2"}}
"""State of each weight, by optimizer."""


class MasterWeights:
    """The trained parameters in fp32, and their optimizer state."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy
        self._model = policy.trainable()
        self._master = {name: _in_fp32(parameter) for name, parameter in self._model.items()}
        self._adam = _open_optimizer(policy.config.optimizer, list(self._master.values()))

    def gradient(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of a loss without accumulating it."""
        return torch.autograd.grad(loss, list(self._model.values()), allow_unused=True)

    def accumulate(self, gradient: Sequence[Tensor | None]) -> None:
        """Add a gradient to the accumulated one."""
        for weight, grad in zip(self._master.values(), gradient, strict=True):
            if grad is None:
                continue
            if weight.grad is None:
                weight.grad = grad.float()
            else:
                weight.grad += grad

    def accumulated(self) -> list[Tensor | None]:
        """The accumulated gradient of each weight, in the order of `policy.trainable()`."""
        return [weight.grad for weight in self._master.values()]

    def like(self) -> list[Tensor]:
        """The weights, whose shapes and device are those of their gradients."""
        return [weight.detach() for weight in self._master.values()]

    def replace_gradient(self, gradient: Sequence[Tensor | None]) -> None:
        """Set the accumulated gradient."""
        for weight, grad in zip(self._master.values(), gradient, strict=True):
            weight.grad = grad

    def drop_gradient(self) -> None:
        """Clear the accumulated gradient."""
        self._adam.zero_grad()

    def step(self, adam: AdamStep) -> float:
        """Apply the gradient and clear it; returns its norm.

        Raises:
            NonFiniteUpdate: the norm is not finite; no weight was changed.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._master.values(), adam.max_grad_norm).item()
        if not math.isfinite(norm):
            self.drop_gradient()
            raise NonFiniteUpdate(f"the gradient's norm is {norm}: nothing was changed")
        for settings in self._adam.param_groups:
            settings.update(
                lr=adam.lr,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        with self._policy.update(self._policy.version + 1):
            self._adam.step()
            self._copy_to_model()
        self.drop_gradient()
        return norm

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state."""
        for name, tensors in self.tensors().items():
            safetensors.save_file(tensors, folder / name)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Weights and optimizer state by file; not copied."""
        weights = {name: weight.detach() for name, weight in self._master.items()}
        moments = {
            # Cloned: the quantization maps of 8-bit moments are shared.
            f"{name}/{moment}": torch.as_tensor(value).clone()
            for name, weight in self._master.items()
            for moment, value in self._adam.state.get(weight, {}).items()
        }
        return {WEIGHTS: weights, OPTIMIZER: moments}

    def restore(self, folder: Path, version: int, *, optimizer: bool = True) -> None:
        """Load what `save` wrote; without `optimizer` the weights alone, with a new optimizer.

        Raises:
            TrainerError: it does not fit the model; nothing was changed.
        """
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            weights = safetensors.load_file(folder / WEIGHTS)
            moments = safetensors.load_file(folder / OPTIMIZER) if optimizer else {}
            states: dict[str, dict[str, Tensor]] = {}
            for key, value in moments.items():
                name, _, moment = key.rpartition("/")
                states.setdefault(name, {})[moment] = value.clone()
            for state in states.values():
                if missing := MOMENTS[self._policy.config.optimizer] - state.keys():
                    raise TrainerError(f"{str(folder)!r} lacks {min(missing)!r} of a weight")
        self._check_shapes(weights, folder)
        with self._policy.update(version), torch.no_grad():
            self._adam.state.clear()
            self.drop_gradient()
            for name, weight in self._master.items():
                weight.copy_(weights[name])
                if state := states.get(name):
                    self._adam.state[weight] = self._load_state(state, weight.device)
            self._copy_to_model()

    def _load_state(
        self, state: dict[str, Tensor], device: torch.device
    ) -> dict[str, Tensor | int]:
        loaded: dict[str, Tensor | int] = {m: v.to(device) for m, v in state.items()}
        if self._policy.config.optimizer == "adamw_8bit":
            loaded["step"] = int(state["step"])
        return loaded

    def start_from(self, folder: Path) -> None:
        """Load weights of a checkpoint or a PEFT adapter, with a new optimizer."""
        with boundary(TrainerError, f"cannot start from {str(folder)!r}"):
            if (file := folder / WEIGHTS).is_file():
                weights = safetensors.load_file(file)
            else:
                saved = safetensors.load_file(folder / "adapter_model.safetensors")
                weights = {parameter_name(name): tensor for name, tensor in saved.items()}
        self._check_shapes(weights, folder)
        with self._policy.update(0), torch.no_grad():
            for name, weight in self._master.items():
                weight.copy_(weights[name])
            self._copy_to_model()

    def _check_shapes(self, weights: dict[str, Tensor], folder: Path) -> None:
        found = {name: tuple(weight.shape) for name, weight in weights.items()}
        expected = {name: tuple(weight.shape) for name, weight in self._master.items()}
        if found == expected:
            return
        odd = sorted({*found.items()} ^ {*expected.items()})[0][0]
        raise TrainerError(
            f"the checkpoint {str(folder)!r} is of another model or other trainer settings: "
            f"{odd!r} is {found.get(odd, 'missing')}, expected {expected.get(odd, 'none')}"
        )

    def _copy_to_model(self) -> None:
        """Round the master weights into the parameters the model runs with."""
        with torch.no_grad():
            for name, parameter in self._model.items():
                if parameter is not self._master[name]:
                    parameter.copy_(self._master[name])


def _open_optimizer(name: str, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        # Fused: nothing is allocated in the middle of a step, so memory cannot run out there.
        return torch.optim.AdamW(weights, lr=1.0, fused=True)
    try:
        library = import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(
            f"trainer.optimizer {name!r} needs bitsandbytes ({error}): pip install bitsandbytes"
        ) from error
    return cast(torch.optim.Optimizer, library.optim.AdamW8bit(weights, lr=1.0))


def _in_fp32(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())
