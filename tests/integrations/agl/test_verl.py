"""The keys of a VERL config as settings of whet."""

from typing import Any

import pytest

import whet.agl as agl
from whet.config import LocalTrainerConfig, resolve
from whet.errors import ConfigError

PUBLISHED: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 32, "max_prompt_length": 4096, "max_response_length": 2048},
    "actor_rollout_ref": {
        "rollout": {
            "name": "vllm",
            "n": 4,
            "tensor_model_parallel_size": 1,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
            "gpu_memory_utilization": 0.6,
        },
        "actor": {
            "ppo_mini_batch_size": 32,
            "ppo_micro_batch_size_per_gpu": 4,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 8, "fsdp_config": {"param_offload": True}},
        "model": {"path": "tiny", "use_remove_padding": True},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "nnodes": 1,
        "val_before_train": True,
        "critic_warmup": 0,
        "logger": ["console"],
        "project_name": "p",
        "experiment_name": "e",
        "save_freq": 64,
        "test_freq": 32,
        "total_epochs": 2,
    },
}
"""A config as the examples of Agent Lightning have it."""


def read_trainer(**model: Any) -> LocalTrainerConfig:
    config = {"actor_rollout_ref": {"model": {"path": "tiny", **model}}}
    trainer = resolve(agl.VERL(config).settings).trainer
    assert isinstance(trainer, LocalTrainerConfig)
    return trainer


def test_a_published_config_is_one_of_whet() -> None:
    config = resolve(agl.VERL(PUBLISHED).settings)
    assert (config.tasks_per_step, config.group_size, config.adam.lr) == (32, 4, 1e-6)
    assert (config.loss.clip_range, config.engine.max_context) == ((0.8, 1.3), 6144)
    assert config.algorithm.divide_by_std
    assert config.loop.mini_batches == 1


def test_all_weights_are_trained_unless_there_is_a_rank() -> None:
    assert read_trainer().weights == read_trainer(lora_rank=0).weights == "full"
    adapters = read_trainer(lora_rank=8, lora_alpha=4)
    assert (adapters.weights, adapters.lora_rank, adapters.lora_alpha) == ("lora", 8, 4)


def test_a_key_that_is_on_and_has_no_counterpart_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_kl_in_reward"):
        agl.VERL({"algorithm": {"use_kl_in_reward": True}})
