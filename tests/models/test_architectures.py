"""Kinds of models: how their rows are trained, where they are sampled, and which are refused."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from support.models.tiny_llama import load, row_of
from whet.app.composition.trainers import check_served
from whet.config import AdamStep, LossConfig, resolve
from whet.engines.local.forward import CudaGraphForward, agrees_with_model, check_sampling
from whet.errors import ConfigError
from whet.models.huggingface import LocalPolicy, count_saved_numbers
from whet.trainers.local import LocalTrainer
from whet.types import Row

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
HYBRID: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "mamba_expand": 1,
    },
    "bamba": MAMBA | {"attn_layer_indices": [1], "mamba_chunk_size": 16},
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
}
WINDOW: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0},
    "gpt_oss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}

GPT2_MODULES = {
    "attention": ("c_attn", "c_proj"),
    "mlp": ("c_fc", "c_proj"),
    "head": ("lm_head",),
}

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(kind: str, **settings: Any) -> Path:
        config = CONFIG_MAPPING[kind](**SMALL | settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return made


def rows_of(policy: LocalPolicy) -> list[Row]:
    """Rows that share prefixes, with the log-probabilities of a plain pass of each."""
    rows: list[Row] = []
    for tokens in ([5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 100, 101, 102, 103], [5, 6, 7, 100, 9]):
        with torch.no_grad():
            logits_TV = policy.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        logp_TV = logits_TV.float().log_softmax(-1)
        sampled = [logp_TV[i + 2, token].item() for i, token in enumerate(tokens[3:])]
        rows.append(row_of(tokens[:3], tokens[3:], sampled, 1.0))
    return rows


def logprob_gap(policy: LocalPolicy, rows: Sequence[Row]) -> float:
    trainer = LocalTrainer(policy, threads=1)
    return anyio.run(trainer.forward_backward, rows, LossConfig())["logprob_gap"]


@pytest.mark.parametrize("kind", [*HYBRID, *WINDOW])
def test_models_with_state_or_windows_are_trained_row_by_row_and_not_sampled_here(
    make: Make, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load(make(kind, **(HYBRID | WINDOW)[kind]), weights="full")
    assert not policy.packs_rows
    assert "trained row by row" in caplog.text
    # Those with a soft cap or sinks are compared with the model's own attention.
    assert logprob_gap(policy, rows_of(policy)) < 1e-5
    with pytest.raises(ConfigError, match="--engine vllm") as error:
        check_sampling(policy)
    assert "\n" not in str(error.value)


def test_attention_that_sdpa_does_not_compute_is_the_models_own(make: Make) -> None:
    folder = make("gemma2", **WINDOW["gemma2"])
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    policy = load(folder, weights="full")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        expected, found = own(input_ids=ids).logits, policy.model(input_ids=ids).logits
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "phi", "helium"])
def test_models_with_full_attention_are_packed_and_sampled(
    make: Make, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load(make(kind), weights="full")
    assert policy.packs_rows
    assert logprob_gap(policy, rows_of(policy)) < 1e-5
    check_sampling(policy)
    assert not [record for record in caplog.records if record.name.startswith("whet")]


def test_a_model_that_rounding_moves_far_is_packed_and_sampled_all_the_same(make: Make) -> None:
    """Large biases of queries and keys, as in Qwen2.5, make bf16 states differ by a third."""
    folder = make("qwen2", num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            weight.data = 30 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    policy = load(folder, weights="full", precision="bf16")
    assert policy.packs_rows
    check_sampling(policy)
    assert agrees_with_model(CudaGraphForward(policy, 64), policy)


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}


def test_positions_that_depend_on_the_length_of_a_row_limit_the_context(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load(make("llama", rope_parameters=LONGROPE), weights="full")
    assert policy.context_length == 32
    assert "the context is limited" in caplog.text
    served: dict[str, Any] = {"kind": "vllm", "urls": ["http://localhost:1"]}
    with pytest.raises(ConfigError, match=r"set engine.max_context to 32 or less"):
        check_served(policy, resolve({"engine": served}))
    check_served(policy, resolve({"engine": served | {"max_context": 32}}))


VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
    "num_heads": 2,
}


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_a_composite_config_is_read_by_its_text_part(make: Make, kind: str) -> None:
    text = SMALL | {"sliding_window": 4, "query_pre_attn_scalar": 16}
    text |= {"layer_types": ["linear_attention", "full_attention"]} if kind == "qwen3_5" else {}
    text |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    policy = load(make(kind, text_config=text, vision_config=VISION), weights="full")
    assert policy.context_length == 256
    assert logprob_gap(policy, rows_of(policy)) < 1e-5


def test_another_kind_of_model_is_refused_in_one_line(tmp_path: Path) -> None:
    CONFIG_MAPPING["clip"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has model_type 'clip': expected one") as error:
        load(tmp_path)
    assert len(str(error.value)) < 300


def test_a_model_without_a_context_length_is_refused_in_one_line(tmp_path: Path) -> None:
    CONFIG_MAPPING["mamba2"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'mamba2' lacks max_position_embeddings"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    "layers", [("attention", "mlp"), ("mlp",), ("attention", "mlp", "head"), ("attention",)]
)
def test_adapters_of_experts_are_made_for_every_choice_and_none_for_the_router(
    make: Make, kind: str, layers: tuple[str, ...]
) -> None:
    policy = load(make(kind, **EXPERTS), lora_layers=layers)
    found = {
        "head" if "lm_head" in name else "attention" if "attn" in name else name.split(".")[-4]
        for name in policy.get_trainable()
    }
    assert {"experts" if name == "base_layer" else name for name in found} == {
        "experts" if layer == "mlp" else layer for layer in layers
    }
    assert logprob_gap(policy, rows_of(policy)) < 1e-5
    served = resolve({"engine": {"kind": "vllm", "urls": ["http://localhost:1"]}})
    if "mlp" in layers:
        with pytest.raises(ConfigError, match=r"set trainer.lora_layers to attention"):
            check_served(policy, served)
    else:
        check_served(policy, served)


@pytest.mark.parametrize(
    "layers", [("attention", "mlp"), ("mlp",), ("attention", "mlp", "head"), ("attention",)]
)
def test_layers_that_are_not_of_torch_get_the_adapters_that_are_asked_for(
    make: Make, layers: tuple[str, ...]
) -> None:
    policy = load(make("gpt2"), lora_layers=layers)
    found = {name.split(".")[-4] for name in policy.get_trainable()}
    assert found == {
        module for layer, modules in GPT2_MODULES.items() for module in modules if layer in layers
    }
    assert logprob_gap(policy, rows_of(policy)) < 1e-5


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_checkpointed_layers_have_the_same_gradients_wherever_a_model_has_them(
    make: Make, kind: str
) -> None:
    folder, norms = make(kind), list[float]()
    for checkpointed in (False, True):
        policy = load(folder, weights="full", gradient_checkpointing=checkpointed)
        trainer = LocalTrainer(policy, threads=1)
        anyio.run(trainer.forward_backward, rows_of(policy), LossConfig())
        norms.append(anyio.run(trainer.optim_step, AdamStep())["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "falcon", "gemma3n_text", "qwen3_5_moe_text"])
def test_the_memory_of_a_pass_is_estimated_whatever_a_config_calls_its_sizes(kind: str) -> None:
    sizes = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers")}
    config = CONFIG_MAPPING[kind](**sizes)
    assert count_saved_numbers(config, checkpointing=True) == 2 * 64
    width = 11_008 if kind == "llama" else 4 * 64
    assert count_saved_numbers(config, checkpointing=False) == 2 * (10 * 64 + 5 * width)


def test_a_model_whose_layers_cannot_be_checkpointed_is_refused_in_one_line(make: Make) -> None:
    with pytest.raises(ConfigError, match="do not support OpenAIGPTModel") as error:
        load(make("openai-gpt"), gradient_checkpointing=True)
    assert "\n" not in str(error.value)


@pytest.fixture(autouse=True)
def _log_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "whet")
