"""`whet models merge`, with adapters, checkpoints and runs as they are on disk."""

import json
import shutil
from pathlib import Path

import anyio
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.models.tiny_llama import load, make_model, nudge, prompt_of
from whet.app.cli.main import main
from whet.app.run_folder import RunFolder
from whet.config import LocalTrainerConfig, RunConfig, resolve
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.trainers.local import LocalTrainer


def logits(model: torch.nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt_of(30)])).logits


def merged(source: Path, out: Path) -> torch.nn.Module:
    assert main(["models", "merge", str(source), str(out)]) == 0
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)


def exported(policy: LocalPolicy, folder: Path) -> Path:
    anyio.run(LocalTrainer(policy, threads=1).export, folder)
    return folder


def test_a_merged_adapter_gives_the_logits_of_both(tiny_folder: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_folder, tmp_path / "base")
    (base / "tokenizer.json").write_text("{}")
    policy = load(base)
    nudge(policy, size=0.1)
    model = merged(exported(policy, tmp_path / "adapter"), tmp_path / "whole")
    assert torch.allclose(logits(model), logits(policy.model), atol=1e-4)
    assert not torch.allclose(logits(model), logits(load(base).model), atol=1e-2)
    assert (tmp_path / "whole" / "tokenizer.json").exists()


def test_merging_an_adapted_head_leaves_the_tied_embeddings_alone(tmp_path: Path) -> None:
    base = resolve_model("tiny")
    policy = load(base, lora_layers=("attention", "head"))
    nudge(policy, size=0.1)
    adapter = exported(policy, tmp_path / "adapter")
    assert all("lora" in name for name in load_file(adapter / "adapter_model.safetensors"))
    model = merged(adapter, tmp_path / "whole")
    assert torch.allclose(logits(model), logits(policy.model), atol=1e-3)
    embeddings = model.get_parameter("model.embed_tokens.weight")
    assert torch.equal(embeddings, load(base).model.get_parameter("model.embed_tokens.weight"))


def test_a_run_and_its_checkpoint_are_merged_too(tiny_folder: Path, tmp_path: Path) -> None:
    config = RunConfig(
        model=str(tiny_folder),
        dir=tmp_path,
        name="run",
        trainer=LocalTrainerConfig(lora_rank=4, lora_alpha=8),
    )
    run = RunFolder.create(config, "train")
    run.store.touch()
    policy = load(tiny_folder)
    nudge(policy, size=0.1)
    anyio.run(LocalTrainer(policy, threads=1).save, run.checkpoints / "step-000001")
    by_checkpoint = merged(run.checkpoints / "step-000001", tmp_path / "one")
    exported(policy, run.model)
    by_run = merged(run.path, tmp_path / "two")
    for model in (by_checkpoint, by_run):
        assert torch.allclose(logits(model), logits(policy.model), atol=1e-4)


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["models", "merge", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_a_model_that_cannot_be_merged_is_an_error_in_one_line(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert "full weights already" in complaint([str(tiny_folder), out], capsys)
    assert "exists already" in complaint([str(tiny_folder), str(tmp_path)], capsys)
    adapter = exported(load(tiny_folder), tmp_path / "adapter")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(make_model(tmp_path / "other", width=64))
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert "does not fit the model" in complaint([str(adapter), out], capsys)
    assert not Path(out).exists()


def test_of_a_run_of_several_policies_one_has_to_be_named(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"model": str(tiny_folder), "dir": str(tmp_path), "name": "two"}
    run = RunFolder.create(resolve({**values, "policies": {"a": {}, "b": {}}}), "train")
    for name in ("a", "b"):
        exported(load(tiny_folder), run.model / name)
    out = str(tmp_path / "out")
    error = complaint([str(run.path), out], capsys)
    assert "has several policies: name one of a, b" in error
    assert main(["models", "merge", str(run.model / "b"), out]) == 0
