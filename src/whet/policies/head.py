"""The last layer: hidden states become logits in fp32, whatever the model computes in.

A logit of 16 rounded to bf16 is off by up to 0.03, and so is its log-probability. Sampler and
trainer both pass here, so what they disagree about is only what the layers below round.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig


class Head:
    """A model's output layer, with what some models do to their logits after it."""

    def __init__(self, linear: nn.Linear, config: PretrainedConfig) -> None:
        """Also gives the layer itself, and so the model, logits in fp32."""
        self._linear = linear
        # An adapter wraps the layer, and adds to what it gives.
        self._plain = cast(nn.Linear, getattr(linear, "base_layer", linear))
        settings = config.to_dict()
        self._cap = float(settings.get("final_logit_softcapping") or 0)
        self._scale = float(settings.get("logit_scale") or 1) / float(
            settings.get("logits_scaling") or 1
        )
        if linear.weight.dtype != torch.float32:
            self._plain.forward = self._wide

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = self._linear(hidden_ND)
        if self._scale != 1:
            logits_NV = logits_NV * self._scale
        if self._cap:
            logits_NV = self._cap * torch.tanh(logits_NV / self._cap)
        return logits_NV

    @property
    def vocabulary(self) -> int:
        """How many logits a hidden state gets."""
        return self._linear.out_features

    @property
    def trained(self) -> list[nn.Parameter]:
        """Those of its weights that are trained."""
        return [parameter for parameter in self._linear.parameters() if parameter.requires_grad]

    def _wide(self, input: Tensor) -> Tensor:
        flat_ND = input.reshape(-1, input.shape[-1])
        logits_NV = cast(Tensor, _WideProduct.apply(flat_ND, self._plain.weight))
        bias_V = cast(Tensor | None, self._plain.bias)
        if bias_V is not None:
            logits_NV = logits_NV + bias_V
        return logits_NV.view(*input.shape[:-1], self.vocabulary)


class _WideProduct(torch.autograd.Function):
    """`hidden @ weight.T` of half-precision tensors, summed and returned in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD)
        if hidden_ND.is_cuda:
            return torch.mm(hidden_ND, weight_VD.t(), out_dtype=torch.float32)
        return functional.linear(hidden_ND.float(), weight_VD.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        # Any: torch gives the context of a function no useful type.
        hidden_ND, weight_VD = ctx.saved_tensors
        grad_NV = grads[0].to(weight_VD.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return (
            grad_NV @ weight_VD if needs_hidden else None,
            grad_NV.t() @ hidden_ND if needs_weight else None,
        )
