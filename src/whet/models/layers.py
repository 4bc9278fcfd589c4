"""Replacement layers of a Hugging Face model: the LM head in fp32, fused RMS norms and rotary.

Sampler and trainer run the same ones, so that their log-probabilities differ only by the order of
sums. A logit of 16 rounded to bf16 is off by up to 0.03, and so is its log-probability: hence the
fp32 head. On a GPU a norm is one kernel instead of six and the rotary embedding one instead of a
dozen; with the kernels of `tree_attention` and `trainers.logprobs` a training step of SmolLM2-135M
takes 0.218 s instead of 0.345 s on an H200. A layer is replaced only if it computes the same on
random input.
"""

from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

try:
    from whet.models import fused_kernels as kernels
except ModuleNotFoundError:  # Triton comes with torch only for GPUs
    kernels = None

BF16_STEP = 2.0**-7
"""Relative difference of two bf16 numbers that differ in one rounding."""

ROTARY_FUNCTION = "apply_rotary_pos_emb"
"""transformers' name of the function that rotates queries and keys."""


class LMHead:
    """A model's output layer, with the logit scaling and capping some models apply after it."""

    def __init__(self, linear: nn.Linear, config: PretrainedConfig) -> None:
        """Also makes the layer itself, and so the model, return logits in fp32."""
        self._linear = linear
        # A LoRA adapter wraps the layer and adds to its output.
        self._base = cast(nn.Linear, getattr(linear, "base_layer", linear))
        settings = config.to_dict()
        self._cap = float(settings.get("final_logit_softcapping") or 0)
        self._scale = float(settings.get("logit_scale") or 1) / float(
            settings.get("logits_scaling") or 1
        )
        if linear.weight.dtype != torch.float32:
            self._base.forward = self._forward_fp32

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = self._linear(hidden_ND)
        if self._scale != 1:
            logits_NV = logits_NV * self._scale
        if self._cap:
            logits_NV = self._cap * torch.tanh(logits_NV / self._cap)
        return logits_NV

    @property
    def vocabulary(self) -> int:
        """Number of logits per hidden state."""
        return self._linear.out_features

    @property
    def trained(self) -> list[nn.Parameter]:
        """Its trainable parameters."""
        return [parameter for parameter in self._linear.parameters() if parameter.requires_grad]

    def _forward_fp32(self, input: Tensor) -> Tensor:
        flat_ND = input.reshape(-1, input.shape[-1])
        logits_NV = cast(Tensor, _ProductFp32.apply(flat_ND, self._base.weight))
        bias_V = cast(Tensor | None, self._base.bias)
        if bias_V is not None:
            logits_NV = logits_NV + bias_V
        return logits_NV.view(*input.shape[:-1], self.vocabulary)


class _ProductFp32(torch.autograd.Function):
    """`hidden @ weight.T` of half-precision tensors, summed and returned in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        # Any: torch has no useful type for the context of a function.
        ctx.save_for_backward(hidden_ND, weight_VD)
        if hidden_ND.is_cuda:
            return torch.mm(hidden_ND, weight_VD.t(), out_dtype=torch.float32)
        return functional.linear(hidden_ND.float(), weight_VD.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_ND, weight_VD = ctx.saved_tensors
        grad_NV = grads[0].to(weight_VD.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return (
            grad_NV @ weight_VD if needs_hidden else None,
            grad_NV.t() @ hidden_ND if needs_weight else None,
        )


# ----------------------------------------------------------------- RMS norms


def fuse_norms(model: nn.Module) -> None:
    """Replace the plain RMS norms of a model on a GPU by fused ones."""
    if kernels is None or not next(model.parameters()).is_cuda:
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            epsilon = cast(object, getattr(child, "variance_epsilon", None))
            weight = cast(object, getattr(child, "weight", None))
            if isinstance(epsilon, float) and isinstance(weight, nn.Parameter):
                fused = _FusedNorm(weight, epsilon)
                if _check_norms(child, fused, weight):
                    setattr(module, name, fused)


class _FusedNorm(nn.Module):
    """An RMS norm that rounds where transformers' rounds."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self._epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, _Norm.apply(hidden, self.weight, self._epsilon))


class _Norm(torch.autograd.Function):
    """Saves only its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        assert kernels is not None
        ctx.save_for_backward(hidden, weight_D)
        ctx.epsilon = epsilon
        return kernels.rms_norm(hidden, weight_D, epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        assert kernels is not None
        hidden, weight_D = ctx.saved_tensors
        return *kernels.rms_norm_grad(grads[0], hidden, weight_D, ctx.epsilon), None


@torch.inference_mode()
def _check_norms(norm: nn.Module, fused: nn.Module, weight: nn.Parameter) -> bool:
    hidden = _draw_tensor((64, len(weight)), weight)
    expected, found = norm(hidden), fused(hidden)
    mostly = (expected == found).float().mean().item() > 0.9
    return mostly and torch.allclose(expected, found, rtol=BF16_STEP, atol=BF16_STEP / 2**7)


# ----------------------------------------------------------------- rotary embeddings


def fuse_rotary(model: nn.Module) -> None:
    """Make the attention modules of a model on a GPU rotate queries and keys in one kernel.

    transformers' attention modules look `apply_rotary_pos_emb` up in the globals of their file;
    each module gets a copy of its forward function with other globals.
    """
    if kernels is None or not next(model.parameters()).is_cuda:
        return
    for module in model.modules():
        forward = find_rotary_forward(module)
        if forward is not None and _check_rotations(
            forward.__globals__.get(ROTARY_FUNCTION), module
        ):
            replace_rotary(module, forward, rotate)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, (B, H, T, D), by the angles of their positions, (B, T, D)."""
    return cast(tuple[Tensor, Tensor], _Rotate.apply(q, k, cos, sin))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        assert kernels is not None
        ctx.save_for_backward(cos, sin)
        return kernels.rotate(q, k, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert kernels is not None
        return *kernels.rotate(*grads, *ctx.saved_tensors, backward=True), None, None


def find_rotary_forward(module: nn.Module) -> FunctionType | None:
    """A module's forward function, if it is a plain one that applies rotary embeddings."""
    forward = cast(object, type(module).forward)
    if not isinstance(forward, FunctionType) or forward.__closure__ is not None:
        return None
    return forward if ROTARY_FUNCTION in forward.__code__.co_names else None


def replace_rotary(module: nn.Module, forward: FunctionType, function: object) -> None:
    """Make one module run its forward function with another rotary function."""
    names = {**forward.__globals__, ROTARY_FUNCTION: function}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copy, module)


@torch.inference_mode()
def _check_rotations(plain: Any, module: nn.Module) -> bool:
    """Whether `rotate` computes the same. Any: signatures differ among transformers' models."""
    width = cast(object, getattr(module, "head_dim", None))
    if not isinstance(width, int) or width % 2:
        return False
    weight = next(module.parameters())
    shapes = (2, 5, 3, width), (2, 2, 3, width), (2, 3, width), (2, 3, width)
    inputs = [_draw_tensor(shape, weight) for shape in shapes]
    try:
        expected = cast(tuple[Tensor, Tensor], plain(*inputs))
    except (TypeError, RuntimeError):  # it takes other arguments
        return False
    few = 8 * torch.finfo(weight.dtype).eps
    pairs = zip(expected, rotate(*inputs), strict=True)
    return all(torch.allclose(a, b, rtol=few, atol=few) for a, b in pairs)


def _draw_tensor(shape: Sequence[int], like: Tensor) -> Tensor:
    """Random input to compare a kernel with.

    Not from torch's global generators: a GPU's must not be used while an engine captures a CUDA
    graph, and another thread may be seeding adapters with the CPU's.
    """
    generator = torch.Generator(like.device)
    generator.seed()
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
