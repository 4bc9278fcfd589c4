"""Files of a snapshot are those that safetensors reads."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors import torch as safetensors

from whet.io import files
from whet.trainers.snapshot import DTYPES, write_safetensors


def test_tensors_of_all_types_and_shapes_are_read_back_by_safetensors(tmp_path: Path) -> None:
    tensors = {f"{dtype}": torch.ones(3, dtype=dtype) for dtype in DTYPES}
    tensors |= {
        "number": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "odd": torch.arange(7, dtype=torch.uint8),
        "gradient": torch.randn(2, 2, requires_grad=True),
    }
    file = tmp_path / "some.safetensors"
    assert write_safetensors(tensors, file) == files.compute_checksum(file)
    found = safetensors.load_file(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with safe_open(file, framework="pt") as lazily:
        assert torch.equal(lazily.get_tensor("odd"), tensors["odd"])


def test_a_large_file_is_synced_while_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    file = tmp_path / "large"
    monkeypatch.setattr(files, "SYNC_BYTES", 1000)
    monkeypatch.setattr(files.os, "fdatasync", lambda _: sizes.append(file.stat().st_size))
    files.write_synced(file, [b"a" * 300, b"b" * 800, b"c" * 2500, b"d"])
    assert file.read_bytes() == b"a" * 300 + b"b" * 800 + b"c" * 2500 + b"d"
    assert sizes == [1100, 2100, 3100]
