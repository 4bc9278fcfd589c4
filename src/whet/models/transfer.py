"""Copies of arrays to a device."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def copy_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device; the copy to a GPU waits in its queue, not in this thread.

    Any: arrays of all types. From ordinary memory a copy would wait for all the GPU's earlier work.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
