"""Rounding errors of a model in bf16, against which two implementations of a pass are compared."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

DEVIATION = 0.29
"""Standard deviation of a rounding error, in units of the last place."""
DISTURBED_RUNS = 4
"""Passes by which the effect of rounding is measured."""


@contextmanager
def simulate_rounding_errors(model: nn.Module) -> Generator[None]:
    """Disturb the outputs of all linear layers as rounding does, otherwise in every pass.

    Rounding moves some models far: in Qwen2.5 the largest activations are in the thousands, and two
    correct implementations of its attention differ by a third.
    """
    parameter = next(model.parameters())
    scale = DEVIATION * torch.finfo(parameter.dtype).eps
    generator = torch.Generator(parameter.device)
    generator.seed()  # torch's own generators may be in use by another thread

    def disturb(module: nn.Module, args: object, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=generator, device=output.device)
        return output * (1 + scale * noise).to(output.dtype)

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_hook(disturb) for module in linear]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
