"""GGUF files, the format of llama.cpp, as Hugging Face folders: weights, tokenizer, chat template.

Weights are decoded once, so that they can be trained. Each file is converted on first use.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray
from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors import torch as safetensors
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from whet.errors import ConfigError, boundary

Progress = Callable[[str], None]
Fields = Mapping[str, Any]
"""The metadata of a GGUF: strings, numbers and lists. Any: the reader has no narrower type."""

CONTROL, USER_DEFINED = 3, 4
"""GGUF's types of tokens that are never split: special ones, and those that are text."""
ADDED = (CONTROL, USER_DEFINED)
END_OF_TEXT = "<|endoftext|>"
THREADS = min(16, os.cpu_count() or 1)
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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


class Architecture(NamedTuple):
    """Differences between the architectures that are converted."""

    name: str
    pairs_rows: bool
    """Whether llama.cpp keeps the rows of a rotary pair together, unlike Hugging Face."""
    config: Mapping[str, JsonValue]
    """Further keys of the config."""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", True, {"attention_bias": False, "mlp_bias": False}),
    "qwen2": Architecture("Qwen2ForCausalLM", False, {"use_sliding_window": False}),
}
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: Mapping[str, list[pre_tokenizers.PreTokenizer]] = {
    # Splitting digits off first matters: byte-level alone would also split the whitespace before
    # a digit, and "\n\n1" would become other tokens.
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
"""llama.cpp's names of the ways to split text before merging, as `tokenizers` writes them."""


def make_folder(file: Path, folder: Path, *, progress: Progress) -> None:
    """Convert a GGUF file into `folder`, with weights in bfloat16.

    Raises:
        ConfigError: that is impossible; then `folder` is unchanged.
    """

    def build(staging: Path) -> None:
        # Quantized to four bits a file is more than a quarter of its weights in sixteen.
        require_room(folder.parent, 4 * file.stat().st_size // 1_000_000)
        progress(f"converting {file.name} to a Hugging Face folder")
        convert(file, staging, "bfloat16")

    write_whole(folder, build)
    progress(f"{file.name} is in {str(folder)!r}")


def write_whole(folder: Path, build: Callable[[Path], None]) -> None:
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


def convert(file: Path, folder: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    """Write the model in a GGUF file into the empty `folder`, as `save_pretrained` would."""
    with boundary(ConfigError, f"cannot read the GGUF file {str(file)!r}"):
        reader = GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    kind, architecture = _read_architecture(file, fields)
    names = {tensor.name: _rename(file, tensor.name) for tensor in reader.tensors}
    tied = "lm_head.weight" not in names.values()
    config = _build_config(kind, architecture, fields) | {
        "dtype": dtype,
        "tie_word_embeddings": tied,
    }
    _write_json(folder / "config.json", config)
    heads = _find_paired_heads(kind, fields) if architecture.pairs_rows else {}
    weights = _decode_all(reader.tensors, names, heads, getattr(torch, dtype))
    safetensors.save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
    # safetensors writes it for the owner only, but a cache may be shared.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    _write_json(folder / "generation_config.json", _find_special_ids(fields))
    _write(folder / "tokenizer.json", _build_tokenizer(fields).to_str(pretty=True))
    _write_json(folder / "tokenizer_config.json", _build_tokenizer_config(kind, fields))
    if template := fields.get("tokenizer.chat_template"):
        _write(folder / "chat_template.jinja", template)


def _read_architecture(file: Path, fields: Fields) -> tuple[str, Architecture]:
    kind = fields.get("general.architecture")
    tokenizer = tuple(fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if kind not in ARCHITECTURES:
        found = f"the architecture {kind!r}, expected {' or '.join(map(repr, ARCHITECTURES))}"
    elif tokenizer[0] != "gpt2" or tokenizer[1] not in PRE_TOKENIZERS:
        known = " or ".join(f"'gpt2/{pre}'" for pre in PRE_TOKENIZERS)
        found = f"the tokenizer '{tokenizer[0]}/{tokenizer[1]}', expected {known}"
    elif scaling != "none":
        found = f"rotary embeddings scaled by {scaling!r}, expected none"
    else:
        return kind, ARCHITECTURES[kind]
    raise ConfigError(
        f"the GGUF file {str(file)!r} cannot be converted: it has {found}; "
        "pass a Hugging Face folder of the model"
    )


def _rename(file: Path, name: str) -> str:
    base, _, kind = name.rpartition(".")
    prefix, _, short = base.rpartition(".")
    if short not in TENSORS or kind not in ("weight", "bias"):
        raise ConfigError(
            f"the GGUF file {str(file)!r} cannot be converted: it has the tensor {name!r}, which "
            "its architecture does not have in Hugging Face's form"
        )
    layer = f"model.layers.{prefix.removeprefix('blk.')}." if prefix else ""
    return f"{layer}{TENSORS[short]}.{kind}"


def _decode_all(
    tensors: list[ReaderTensor],
    names: Mapping[str, str],
    heads: Mapping[str, int],
    dtype: torch.dtype,
) -> Generator[tuple[str, torch.Tensor]]:
    def decode(tensor: ReaderTensor) -> tuple[str, torch.Tensor]:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if paired := heads.get(tensor.name.rpartition(".")[0].rpartition(".")[2]):
            weights = _split_halves(weights, paired)
        return names[tensor.name], torch.from_numpy(weights.copy()).to(dtype)

    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(decode, tensors)


def _find_paired_heads(kind: str, fields: Fields) -> dict[str, int]:
    return {
        "attn_q": fields[f"{kind}.attention.head_count"],
        "attn_k": fields[f"{kind}.attention.head_count_kv"],
    }


def _split_halves(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head for Hugging Face's rotary embedding.

    It rotates pairs of rows. llama.cpp keeps a pair together (0 1, 2 3, ...), Hugging Face keeps
    the first of every pair in one half of the head and the second in the other.
    """
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _build_config(kind: str, architecture: Architecture, fields: Fields) -> dict[str, JsonValue]:
    heads, width = fields[f"{kind}.attention.head_count"], fields[f"{kind}.embedding_length"]
    theta = fields[f"{kind}.rope.freq_base"]
    return {
        "architectures": [architecture.name],
        "model_type": kind,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields[f"{kind}.context_length"],
        "hidden_size": width,
        "intermediate_size": fields[f"{kind}.feed_forward_length"],
        "num_hidden_layers": fields[f"{kind}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields[f"{kind}.attention.head_count_kv"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        # The file has float32, in which 1e-05 is 9.999999747e-06.
        "rms_norm_eps": float(f"{fields[f'{kind}.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "attention_dropout": 0.0,
        "use_cache": True,
        **architecture.config,
        **_find_special_ids(fields),
    }


def _find_special_ids(fields: Fields) -> dict[str, JsonValue]:
    """Ids of special tokens; a text may end with its end-of-text token too."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {k: fields.get(f"tokenizer.ggml.{v}_token_id") for k, v in names.items()}
    ids: dict[str, JsonValue] = {f"{k}_token_id": v for k, v in found.items() if v is not None}
    if fields["tokenizer.ggml.pre"] == "qwen2" and END_OF_TEXT in fields["tokenizer.ggml.tokens"]:
        ids["eos_token_id"] = [found["eos"], fields["tokenizer.ggml.tokens"].index(END_OF_TEXT)]
    return ids


def _build_tokenizer(fields: Fields) -> Tokenizer:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    pre = fields["tokenizer.ggml.pre"]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    whole = [(t, kind) for t, kind in zip(tokens, types, strict=True) if kind in ADDED]
    added = [AddedToken(t, special=kind == CONTROL, normalized=False) for t, kind in whole]
    tokenizer.add_tokens(added)
    return tokenizer


def _build_tokenizer_config(kind: str, fields: Fields) -> Mapping[str, JsonValue]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {k: fields.get(f"tokenizer.ggml.{v}_token_id") for k, v in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields[f"{kind}.context_length"],
        **{f"{k}_token": tokens[id] for k, id in ids.items() if id is not None},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }


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
