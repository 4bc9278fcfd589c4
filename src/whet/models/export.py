"""Export of published weights as PEFT or Hugging Face folders for inference servers.

Needs no torch.
"""

import json
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from whet.config import LocalTrainerConfig
from whet.errors import EngineError, boundary
from whet.io.files import atomic_folder

ADAPTER_INFIX = ".default"
"""PEFT's default adapter name inside parameter names; its files omit it."""


def write_adapter(weights: Path, folder: Path, trainer: LocalTrainerConfig, *, base: Path) -> None:
    """Write a PEFT adapter folder with these weights, bit for bit. The write is atomic.

    Raises:
        EngineError: the weights cannot be read.
    """
    with _write_atomic_folder(folder) as partial:
        names = _copy_renamed(weights, partial / "adapter_model.safetensors", _name_adapter)
        layers = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base),
            "r": trainer.lora_rank,
            "lora_alpha": trainer.lora_alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": layers,
            "inference_mode": True,
        }
        (partial / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_full(weights: Path, folder: Path, *, base: Path) -> None:
    """Write a model folder with these weights. The write is atomic. Raises EngineError."""
    with _write_atomic_folder(folder) as partial:
        for file in base.iterdir():
            if file.is_file() and file.suffix in (".json", ".jinja"):
                shutil.copy2(file, partial / file.name)
        (partial / "model.safetensors.index.json").unlink(missing_ok=True)
        _copy_renamed(weights, partial / "model.safetensors", str)


def convert_parameter_name(name: str) -> str:
    """The parameter that a tensor of a PEFT adapter's file is for."""
    return re.sub(r"\.(lora_[AB])\.", rf".\1{ADAPTER_INFIX}.", name)


def _name_adapter(name: str) -> str:
    return name.replace(f"{ADAPTER_INFIX}.", ".")


@contextmanager
def _write_atomic_folder(folder: Path) -> Generator[Path]:
    with (
        boundary(EngineError, f"cannot write {str(folder)!r} for the server"),
        atomic_folder(folder) as partial,
    ):
        yield partial


def _copy_renamed(source: Path, target: Path, name: Callable[[str], str]) -> list[str]:
    """Copy a safetensors file, renaming its tensors; their bytes stay the same."""
    with source.open("rb") as old, target.open("wb") as new:
        header = json.loads(old.read(int.from_bytes(old.read(8), "little")))
        renamed = {key if key == "__metadata__" else name(key): v for key, v in header.items()}
        text = json.dumps(renamed).encode()
        text += b" " * (-len(text) % 8)
        new.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(old, new, 1 << 20)
    return [key for key in renamed if key != "__metadata__"]
