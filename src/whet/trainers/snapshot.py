"""Snapshot of weights and optimizer state, which is written while training goes on."""

import json
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import torch as safetensors
from torch import Tensor

from whet.io.files import atomic_folder

STATE = "state.json"
PINNED_BYTES = 64 * 2**20


class Snapshot:
    """Tensors at one moment, copied to memory by whoever needs it first.

    That is the thread that writes them, while the next rollouts are sampled, or the next update.
    """

    def __init__(
        self, tensors: Mapping[str, Mapping[str, Tensor]], version: int, *, is_copied: bool = False
    ) -> None:
        """`tensors` are by file and name, and stay unchanged until `copy` returns, unless they are
        copies in memory already."""
        self._tensors: Mapping[str, Mapping[str, Tensor]] = tensors
        self._version = version
        self._lock = threading.Lock()
        self._is_copied = is_copied

    def copy(self) -> None:
        """Copy the tensors, unless they are copied already."""
        with self._lock:
            if not self._is_copied:
                with torch.no_grad(), _beside_sampling() as copy:
                    self._tensors = {
                        file: {name: copy(tensor) for name, tensor in tensors.items()}
                        for file, tensors in self._tensors.items()
                    }
                self._is_copied = True

    def write(self, folder: Path) -> None:
        """Write the checkpoint atomically, and free the copy."""
        self.copy()
        tensors, self._tensors = self._tensors, {}
        with atomic_folder(folder) as to:
            for file, named in tensors.items():
                safetensors.save_file(dict(named), to / file)
            (to / STATE).write_text(json.dumps({"version": self._version}))


@contextmanager
def _beside_sampling() -> Generator[Callable[[Tensor], Tensor]]:
    """Return a function that copies a tensor to memory without delaying a sampler on its GPU.

    A stream of its own does not queue up with the sampler's work, and pinned memory in between does
    not hold the driver's lock, which a copy to ordinary memory holds to its end.
    """
    if not torch.cuda.is_available():
        yield Tensor.clone
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    pinned = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor.clone()
        copied = torch.empty(tensor.shape, dtype=tensor.dtype)
        source = tensor.detach().reshape(-1).view(torch.uint8)
        target = copied.view(-1).view(torch.uint8)
        for begin in range(0, len(source), PINNED_BYTES):
            part = source[begin : begin + PINNED_BYTES]
            staged = pinned[: len(part)]
            staged.copy_(part, non_blocking=True)
            stream.synchronize()
            target[begin : begin + len(part)].copy_(staged)
        return copied

    with torch.cuda.stream(stream):
        yield copy
