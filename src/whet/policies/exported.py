"""Weights as inference servers load them, made from what a trainer publishes. Needs no torch."""

import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from whet.config import TrainerConfig
from whet.errors import EngineError, boundary

ADAPTER_INFIX = ".default"
"""PEFT's name for the adapter of a model that has one; its files leave it out."""


def write_adapter(weights: Path, folder: Path, trainer: TrainerConfig, *, base: Path) -> None:
    """A PEFT adapter folder with these weights, bit for bit. Appears whole or not at all.

    Raises:
        EngineError: the weights cannot be read.
    """
    with _appearing(folder) as partial:
        names = _rename(weights, partial / "adapter_model.safetensors", _adapter_name)
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
    """A model folder with these weights. Appears whole or not at all. Raises EngineError."""
    with _appearing(folder) as partial:
        for file in base.iterdir():
            if file.is_file() and file.suffix in (".json", ".jinja"):
                shutil.copy2(file, partial / file.name)
        (partial / "model.safetensors.index.json").unlink(missing_ok=True)
        _rename(weights, partial / "model.safetensors", str)


def _adapter_name(name: str) -> str:
    return name.replace(f"{ADAPTER_INFIX}.", ".")


@contextmanager
def _appearing(folder: Path) -> Generator[Path]:
    partial = folder.with_name(f".{folder.name}.partial")
    with boundary(EngineError, f"cannot make {str(folder)!r} for the server"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)


def _rename(source: Path, target: Path, name: Callable[[str], str]) -> list[str]:
    """Copy a safetensors file with other names for its tensors, whose bytes stay as they are."""
    with source.open("rb") as old, target.open("wb") as new:
        header = json.loads(old.read(int.from_bytes(old.read(8), "little")))
        renamed = {key if key == "__metadata__" else name(key): v for key, v in header.items()}
        text = json.dumps(renamed).encode()
        text += b" " * (-len(text) % 8)
        new.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(old, new, 1 << 20)
    return [key for key in renamed if key != "__metadata__"]
