"""Trained parameters in fp32, and their optimizer state."""

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors import torch as safetensors
from torch import Tensor, nn

from whet.config import AdamStep
from whet.errors import ConfigError, NonFiniteUpdate, TrainerError, boundary
from whet.models.export import convert_parameter_name
from whet.models.huggingface import LocalPolicy
from whet.trainers.snapshot import write_checkpoint

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
MOMENTS = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "adamw_8bit": {"step", "state1", "state2"}}
"""State of each weight, by optimizer."""


class MasterWeights:
    """The trained parameters in fp32, and their optimizer state."""

    def __init__(
        self, policy: LocalPolicy, parameters: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        """`parameters` are what this process has of the trainable ones, if not all of them."""
        self._policy = policy
        trainable = policy.get_trainable()
        self._shapes = {name: tuple(parameter.shape) for name, parameter in trainable.items()}
        self._model = parameters or trainable
        self._master = {name: _copy_to_fp32(parameter) for name, parameter in self._model.items()}
        self._adam = _open_optimizer(policy.config.optimizer, list(self._master.values()))

    def compute_gradient(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of a loss without accumulating it."""
        return torch.autograd.grad(loss, list(self._model.values()), allow_unused=True)

    def accumulate(self, gradient: Sequence[Tensor | None]) -> None:
        """Add a gradient to the accumulated one, all of it or nothing."""
        weights = self._master.values()
        # A first gradient takes memory, which may run out: before any is added.
        converted = [
            grad.float() if grad is not None and weight.grad is None else grad
            for weight, grad in zip(weights, gradient, strict=True)
        ]
        for weight, grad in zip(weights, converted, strict=True):
            if weight.grad is None:
                weight.grad = grad
            elif grad is not None:
                weight.grad += grad

    def get_accumulated(self) -> list[Tensor | None]:
        """The accumulated gradient of each weight, in the order of `policy.get_trainable()`."""
        return [weight.grad for weight in self._master.values()]

    def detach_weights(self) -> list[Tensor]:
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
        total = self._measure_norm()
        torch.nn.utils.clip_grads_with_norm_(self._master.values(), adam.max_grad_norm, total)
        norm = total.item()
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

    def _measure_norm(self) -> Tensor:
        """Norm of the accumulated gradient."""
        return torch.nn.utils.get_total_norm([g for g in self.get_accumulated() if g is not None])

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into an existing folder."""
        tensors = {
            file: {name: tensor.cpu() for name, tensor in named.items()}
            for file, named in self.list_tensors().items()
        }
        write_checkpoint(tensors, self._policy.version, folder)

    def list_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Weights and optimizer state by file; not copied."""
        weights = {name: weight.detach() for name, weight in self._master.items()}
        moments = {
            f"{name}/{moment}": torch.as_tensor(value)
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
            self.check(folder)
            weights = self._load_file(folder / WEIGHTS)
            moments = self._load_file(folder / OPTIMIZER) if optimizer else {}
            states: dict[str, dict[str, Tensor]] = {}
            for key, value in moments.items():
                name, _, moment = key.rpartition("/")
                states.setdefault(name, {})[moment] = value.clone()
            for state in states.values():
                if missing := MOMENTS[self._policy.config.optimizer] - state.keys():
                    raise TrainerError(f"{str(folder)!r} lacks {min(missing)!r} of a weight")
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
        """Load weights of a checkpoint or a PEFT adapter, with a new optimizer.

        Raises:
            TrainerError: they do not fit the model; nothing was changed.
        """
        with boundary(TrainerError, f"cannot start from {str(folder)!r}"):
            self.check(folder)
            file = _find_weights_file(folder)
            weights = {
                _name_parameter(n, file): tensor for n, tensor in self._load_file(file).items()
            }
        with self._policy.update(0), torch.no_grad():
            for name, weight in self._master.items():
                weight.copy_(weights[name])
            self._copy_to_model()

    def check(self, folder: Path) -> None:
        """Check that the weights of a checkpoint or a PEFT adapter fit the model.

        Raises:
            TrainerError: they do not. What reading a file raises is left to the caller.
        """
        file = _find_weights_file(folder)
        found = {_name_parameter(name, file): shape for name, shape in _read_shapes(file)}
        if found == self._shapes:
            return
        odd = sorted({*found.items()} ^ {*self._shapes.items()})[0][0]
        raise TrainerError(
            f"the checkpoint {str(folder)!r} was written for another model or other trainer "
            f"settings: {odd!r} is {found.get(odd, 'missing')}, expected "
            f"{self._shapes.get(odd, 'none')}"
        )

    def _load_file(self, file: Path) -> dict[str, Tensor]:
        """Read what this process has of the tensors in a file."""
        return safetensors.load_file(file)

    def _copy_to_model(self) -> None:
        """Round the master weights into the parameters the model runs with."""
        with torch.no_grad():
            for name, parameter in self._model.items():
                if parameter is not self._master[name]:
                    parameter.copy_(self._master[name])


def _find_weights_file(folder: Path) -> Path:
    """The weights of a checkpoint, or of a PEFT adapter."""
    file = folder / WEIGHTS
    return file if file.is_file() else folder / "adapter_model.safetensors"


def _name_parameter(name: str, file: Path) -> str:
    """The parameter that a tensor in a file is for."""
    return name if file.name == WEIGHTS else convert_parameter_name(name)


def _read_shapes(file: Path) -> Iterable[tuple[str, tuple[int, ...]]]:
    with open_tensors(file) as tensors:
        for name in cast(list[str], tensors.keys()):
            yield name, tuple(cast(list[int], tensors.get_slice(name).get_shape()))


def open_tensors(file: Path) -> Any:
    """Open a file of tensors to read parts of it. Any: safetensors has no types."""
    return cast(Any, safe_open)(file, "pt")


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


def _copy_to_fp32(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())
