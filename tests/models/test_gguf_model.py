"""GGUF files as models: weights, tokenizer and settings of a small Qwen2, and their cache."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from whet.errors import ConfigError
from whet.models.catalog import find_model, resolve_model

WIDTH, HEADS, KV_HEADS, INNER = 32, 4, 2, 64
WORDS = ["x", "Ċ", "ĊĊ", "Ġ", "ĠĠ", "1", "2", "é", "<|endoftext|>", "<|im_end|>", "<tool_call>"]
VALUES: dict[str, Any] = {
    "qwen2.block_count": 1,
    "qwen2.context_length": 64,
    "qwen2.embedding_length": WIDTH,
    "qwen2.feed_forward_length": INNER,
    "qwen2.attention.head_count": HEADS,
    "qwen2.attention.head_count_kv": KV_HEADS,
    "qwen2.rope.freq_base": 1000000.0,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-06,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": [1] * 8 + [3, 3, 4],
    "tokenizer.ggml.merges": ["Ċ Ċ", "Ġ Ġ"],
    "tokenizer.ggml.eos_token_id": 9,
    "tokenizer.ggml.padding_token_id": 8,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
SHAPES = {
    "token_embd.weight": (len(WORDS), WIDTH),
    "output.weight": (len(WORDS), WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.attn_q.weight": (WIDTH, WIDTH),
    "blk.0.attn_q.bias": (WIDTH,),
    "blk.0.attn_k.weight": (WIDTH // HEADS * KV_HEADS, WIDTH),
    "blk.0.attn_k.bias": (WIDTH // HEADS * KV_HEADS,),
    "blk.0.attn_v.weight": (WIDTH // HEADS * KV_HEADS, WIDTH),
    "blk.0.attn_v.bias": (WIDTH // HEADS * KV_HEADS,),
    "blk.0.attn_output.weight": (WIDTH, WIDTH),
    "blk.0.ffn_norm.weight": (WIDTH,),
    "blk.0.ffn_gate.weight": (INNER, WIDTH),
    "blk.0.ffn_up.weight": (INNER, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, INNER),
}


def write(file: Path, kind: str = "qwen2", *, extra: str | None = None, **changed: Any) -> Path:
    """Write a GGUF whose matrices are quantized to eight bits."""
    writer = GGUFWriter(file, kind)
    add: dict[type, Any] = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in {**VALUES, **changed}.items():
        add[type(value)](key, value)
    rng = np.random.default_rng(0)
    for name, shape in {**SHAPES, **({extra: (WIDTH,)} if extra else {})}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            kind_of = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(array, kind_of), raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def resolve(file: Path, cache: Path) -> tuple[Path, list[str]]:
    messages: list[str] = []
    return resolve_model(str(file), cache=cache, progress=messages.append), messages


def complaint(file: Path, cache: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(str(file), cache=cache)
    assert "\n" not in str(caught.value)
    assert not list((cache / "models").iterdir())
    return str(caught.value)


def test_the_weights_are_those_of_the_file_decoded(tmp_path: Path) -> None:
    file = write(tmp_path / "small.gguf")
    folder, _ = resolve(file, tmp_path / "cache")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert not model.config.tie_word_embeddings  # the file has an output matrix of its own
    found = model.state_dict()
    assert len(found) == len(SHAPES)
    layer = "model.layers.0"
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "blk.0.attn_q.weight": f"{layer}.self_attn.q_proj.weight",
        "blk.0.attn_k.bias": f"{layer}.self_attn.k_proj.bias",
        "blk.0.ffn_down.weight": f"{layer}.mlp.down_proj.weight",
        "blk.0.ffn_norm.weight": f"{layer}.post_attention_layernorm.weight",
    }
    for tensor in gguf.GGUFReader(file).tensors:
        if name := names.get(tensor.name):
            decoded = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
            assert torch.equal(found[name], torch.from_numpy(decoded).to(torch.bfloat16))


def test_the_tokenizer_splits_digits_and_keeps_added_tokens_whole(tmp_path: Path) -> None:
    folder, _ = resolve(write(tmp_path / "small.gguf"), tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("x\n\n12").tokens == ["x", "ĊĊ", "1", "2"]
    assert tokenizer.encode("x<tool_call>\n<|im_end|>").ids == [0, 10, 1, 9]
    assert tokenizer.decode([0, 10, 9]) == "x<tool_call>"  # a special token is no text
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [9, 8]


def test_a_file_is_converted_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "small.gguf")
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    assert find_model(str(file)) is None
    folder, messages = resolve(file, tmp_path / "cache")
    assert len(messages) == 2
    assert find_model(str(file)) == folder
    assert resolve(file, tmp_path / "cache") == (folder, [])
    os.utime(file, (1, 1))
    again, messages = resolve(file, tmp_path / "cache")
    assert again != folder
    assert messages


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found = complaint(write(tmp_path / "a.gguf", "gemma3"), cache)
    assert "has the architecture 'gemma3', expected 'llama' or 'qwen2'" in found
    found = complaint(write(tmp_path / "b.gguf", **{"tokenizer.ggml.pre": "dbrx"}), cache)
    assert "has the tokenizer 'gpt2/dbrx', expected 'gpt2/smollm' or 'gpt2/qwen2'" in found
    found = complaint(write(tmp_path / "c.gguf", **{"qwen2.rope.scaling.type": "yarn"}), cache)
    assert "rotary embeddings scaled by 'yarn', expected none" in found
    found = complaint(write(tmp_path / "d.gguf", extra="blk.0.attn_sinks.weight"), cache)
    assert "has the tensor 'blk.0.attn_sinks.weight'" in found
    (tmp_path / "e.gguf").write_bytes(b"GGUF and nothing else")
    assert "cannot read the GGUF file" in complaint(tmp_path / "e.gguf", cache)
    (tmp_path / "f.gguf").touch()
    assert "cannot read the GGUF file" in complaint(tmp_path / "f.gguf", cache)
