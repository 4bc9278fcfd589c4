"""Rotary positions in one kernel instead of a dozen, where there is a GPU.

transformers turns queries and keys by a function that each attention module finds among the names
of its file. Here the modules of one model find another, and nobody else's do.
"""

from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from whet.policies.norms import noise

try:
    from whet.policies import kernels
except ModuleNotFoundError:  # Triton comes only with a torch that has a GPU
    kernels = None

NAME = "apply_rotary_pos_emb"
"""What transformers calls its function."""


def fuse_rotary(model: nn.Module) -> None:
    """Have the attention of a model on a GPU turn in one kernel, where that is the same."""
    if kernels is None or not next(model.parameters()).is_cuda:
        return
    for module in model.modules():
        forward = own_pass(module)
        if forward is not None and _same(forward.__globals__.get(NAME), module):
            redirect(module, forward, turn)


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, (B, H, T, D), turned by the angles of their positions, (B, T, D)."""
    return cast(tuple[Tensor, Tensor], _Turn.apply(q, k, cos, sin))


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # Any: torch gives the context of a function no useful type.
        assert kernels is not None
        ctx.save_for_backward(cos, sin)
        return kernels.turn(q, k, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert kernels is not None
        return *kernels.turn(*grads, *ctx.saved_tensors, back=True), None, None


def own_pass(module: nn.Module) -> FunctionType | None:
    """A module's own code, if it turns and nothing is wrapped around it."""
    forward = cast(object, type(module).forward)
    if not isinstance(forward, FunctionType) or forward.__closure__ is not None:
        return None
    return forward if NAME in forward.__code__.co_names else None


def redirect(module: nn.Module, forward: FunctionType, function: object) -> None:
    """Have one module run the same code, which finds this function by the name of the other."""
    names = {**forward.__globals__, NAME: function}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copy, module)


@torch.inference_mode()
def _same(plain: Any, module: nn.Module) -> bool:
    """Whether it is plain turning. Any: a function of transformers, of which there are many."""
    width = cast(object, getattr(module, "head_dim", None))
    if not isinstance(width, int) or width % 2:
        return False
    weight = next(module.parameters())
    shapes = (2, 5, 3, width), (2, 2, 3, width), (2, 3, width), (2, 3, width)
    given = [noise(shape, weight) for shape in shapes]
    try:
        expected = cast(tuple[Tensor, Tensor], plain(*given))
    except (TypeError, RuntimeError):  # it wants something else
        return False
    few = 8 * torch.finfo(weight.dtype).eps
    pairs = zip(expected, turn(*given), strict=True)
    return all(torch.allclose(a, b, rtol=few, atol=few) for a, b in pairs)
