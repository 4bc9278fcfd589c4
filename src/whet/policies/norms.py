"""RMS norms in one kernel instead of six, where there is a GPU, for sampler and trainer alike."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

try:
    from whet.policies import kernels
except ModuleNotFoundError:  # Triton comes only with a torch that has a GPU
    kernels = None

ULP = 2.0**-7
"""How far two results in bf16 may be apart that differ in one rounding."""


def fuse_norms(model: nn.Module) -> None:
    """Replace every norm on a GPU that is proven to be a plain one."""
    if kernels is None or not next(model.parameters()).is_cuda:
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            epsilon = cast(object, getattr(child, "variance_epsilon", None))
            weight = cast(object, getattr(child, "weight", None))
            if isinstance(epsilon, float) and isinstance(weight, nn.Parameter):
                fused = _FusedNorm(weight, epsilon)
                if _same(child, fused, weight):
                    setattr(module, name, fused)


class _FusedNorm(nn.Module):
    """Rounds where transformers' norm rounds."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self._epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, _Norm.apply(hidden, self.weight, self._epsilon))


class _Norm(torch.autograd.Function):
    """Keeps its input for the backward pass, and nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        # Any: torch gives the context of a function no useful type.
        assert kernels is not None
        ctx.save_for_backward(hidden, weight_D)
        ctx.epsilon = epsilon
        return kernels.rms_norm(hidden, weight_D, epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        assert kernels is not None
        hidden, weight_D = ctx.saved_tensors
        return *kernels.rms_norm_slope(grads[0], hidden, weight_D, ctx.epsilon), None


def noise(shape: Sequence[int], like: Tensor) -> Tensor:
    """Numbers to try a kernel with.

    Not of torch's own generators: a GPU's draws nothing while an engine records a graph, and with
    the CPU's somebody may be seeding adapters.
    """
    generator = torch.Generator(like.device)
    generator.seed()
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)


@torch.inference_mode()
def _same(norm: nn.Module, fused: nn.Module, weight: nn.Parameter) -> bool:
    hidden = noise((64, len(weight)), weight)
    expected, found = norm(hidden), fused(hidden)
    mostly = (expected == found).float().mean().item() > 0.9
    return mostly and torch.allclose(expected, found, rtol=ULP, atol=ULP / 2**7)
