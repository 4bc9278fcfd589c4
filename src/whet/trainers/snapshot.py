"""Snapshot of weights and optimizer state, which is written while training goes on."""

import json
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from whet.errors import TrainerError, boundary
from whet.io.files import atomic_folder, compute_checksum, write_synced

STATE = "state.json"
PINNED_BYTES = 64 * 2**20

LENGTH = Struct("<Q")
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in safetensors files."""


class Snapshot:
    """Tensors at one moment, copied to memory before they are written or changed.

    The copy is made by the thread that writes them, or by the next update if that comes first.
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
                with torch.no_grad(), _open_copy_stream() as copy:
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
            write_checkpoint(tensors, self._version, to)


def write_checkpoint(
    tensors: Mapping[str, Mapping[str, Tensor]], version: int, folder: Path
) -> None:
    """Write tensors in memory, by file and name, into an existing folder."""
    checksums = {file: write_safetensors(named, folder / file) for file, named in tensors.items()}
    (folder / STATE).write_text(json.dumps({"version": version, "crc32": checksums}))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, and not a PEFT adapter."""
    return (folder / STATE).is_file()


def check_checkpoint(folder: Path) -> int:
    """Check that the files of a checkpoint are as they were written; returns its version.

    Raises:
        TrainerError: they are not, or cannot be read.
    """
    with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
        state = json.loads((folder / STATE).read_text())
        if "crc32" not in state:
            raise TrainerError(
                f"the checkpoint {str(folder)!r} has no checksums: an older version of whet wrote "
                "it, train again"
            )
        for name, checksum in state["crc32"].items():
            if compute_checksum(folder / name) != checksum:
                raise TrainerError(
                    f"the checkpoint {str(folder)!r} is damaged: {name!r} is not as it was "
                    "written, use another checkpoint"
                )
        return int(state["version"])


def write_safetensors(tensors: Mapping[str, Tensor], file: Path) -> int:
    """Write tensors in memory to a safetensors file, which is synced while it grows.

    Returns its checksum.

    The library's own function writes all of it first, and copies the tensors once more.
    """
    # Larger types first, so that each tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % LENGTH.size)
    contents = (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for _, tensor in ordered
    )
    return write_synced(file, chain([LENGTH.pack(len(packed)), packed], contents))


@contextmanager
def _open_copy_stream() -> Generator[Callable[[Tensor], Tensor]]:
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
