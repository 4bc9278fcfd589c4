"""Settings of a run as keys of verl's config: presets, what whet decides, and what contradicts it.

Needs neither verl nor Ray: a wrong key is explained before anything starts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from whet.config import RunConfig, VerlConfig
from whet.config.run import VERL_ALGORITHMS
from whet.errors import ConfigError

Overrides = dict[str, JsonValue]
"""Values by the dotted keys of verl's config."""

SECTION = "whet"
"""Section of verl's config with our own settings, which verl passes on to the manager."""

ESTIMATORS = {name: f"whet_{name.replace('+', '_plus')}" for name in VERL_ALGORITHMS}
"""Advantage estimators of the plugin by the names of our algorithms."""
LOSS = "whet_rollout"
"""Policy loss of the plugin, in which every rollout weighs the same."""

LEARNING_RATE = 1e-6

DECIDED = {
    "data.train_batch_size": "tasks_per_step",
    "actor_rollout_ref.rollout.n": "group_size",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.rollout.temperature": "runner.temperature",
    "actor_rollout_ref.actor.optim.lr": "adam.lr",
    "trainer.total_training_steps": "steps",
    "data.seed": "seed",
}
"""Keys that have a setting of their own."""
FIXED = {
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "whet is that class",
    "actor_rollout_ref.rollout.calculate_log_probs": "rows have the sampler's log-probabilities",
    "actor_rollout_ref.rollout.mode": "whet talks to servers, which is mode 'async'",
    "actor_rollout_ref.rollout.top_p": "log-probabilities of a cut distribution cannot be trained",
    "actor_rollout_ref.rollout.top_k": "log-probabilities of a cut distribution cannot be trained",
    "data.custom_cls.path": "the tasks are whet's",
    "data.custom_cls.name": "the tasks are whet's",
    "data.train_files": "the tasks are whet's",
    "data.val_files": "the held-out tasks are whet's",
    "reward.reward_model.enable": "agents return their rewards",
    "trainer.use_v1": "only verl's V1 trainers have the queue that whet writes to",
    "transfer_queue.enable": "whet writes its rows there",
}
"""Keys that no run may change, and why."""

COMMON: Overrides = {
    "algorithm.rollout_correction.bypass_mode": True,
    "actor_rollout_ref.actor.policy_loss.loss_mode": LOSS,
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.rollout.name": "vllm",
    "trainer.logger": ["console"],
    "trainer.nnodes": 1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
}
"""Defaults in all presets; a run may override them."""

PRESETS: dict[str, Overrides] = {
    "tiny": {
        "trainer.n_gpus_per_node": 1,
        "trainer.v1.trainer_mode": "sync",
        "trainer.save_freq": -1,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
        "actor_rollout_ref.rollout.enforce_eager": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    },
    "one-gpu": {
        "trainer.n_gpus_per_node": 1,
        "trainer.v1.trainer_mode": "sync",
        "trainer.save_freq": 10,
        "data.max_prompt_length": 4096,
        "data.max_response_length": 4096,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    },
    "node": {
        "trainer.n_gpus_per_node": 8,
        "trainer.v1.trainer_mode": "colocate_async",
        "trainer.save_freq": 10,
        "data.max_prompt_length": 8192,
        "data.max_response_length": 8192,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 32768,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 4,
    },
}
"""Sizes to start from: a check of the path, one GPU, one machine with eight."""


def build_overrides(
    config: RunConfig, *, model: Path, folder: Path, tasks: Path, held_out: Path | None
) -> Overrides:
    """Translate a run's config: common defaults, the preset, whet's settings, the user's own.

    Raises:
        ConfigError: the user's keys contradict whet's, or are not `key=value`.
    """
    assert isinstance(config.trainer, VerlConfig)
    own = parse_overrides(config.trainer.overrides)
    check_contradictions(own)
    temperature = 1.0 if config.runner.temperature is None else config.runner.temperature
    decided: Overrides = {
        "data.train_batch_size": config.tasks_per_step,
        "data.train_files": [str(tasks)],
        "data.val_files": [str(held_out or tasks)],
        "data.custom_cls.path": "pkg://whet.trainers.verl.dataset",
        "data.custom_cls.name": "TaskDataset",
        "data.dataloader_num_workers": 0,
        "data.return_raw_chat": True,
        "data.seed": config.seed,
        "algorithm.adv_estimator": ESTIMATORS[config.algorithm.name],
        "algorithm.norm_adv_by_std_in_grpo": config.algorithm.divide_by_std,
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.actor.optim.lr": config.adam.lr or LEARNING_RATE,
        "actor_rollout_ref.actor.ppo_mini_batch_size": config.tasks_per_step,
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "whet.app.verl.manager.Manager",
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.rollout.n": config.group_size,
        "actor_rollout_ref.rollout.temperature": temperature,
        "actor_rollout_ref.rollout.top_p": 1,
        "actor_rollout_ref.rollout.top_k": -1,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.experiment_name": folder.name,
        "trainer.project_name": "whet",
        "trainer.total_training_steps": config.steps,
        "trainer.total_epochs": max(1, config.steps),
        "trainer.use_v1": True,
        "transfer_queue.enable": True,
    }
    return COMMON | PRESETS[config.trainer.preset] | decided | own


def parse_overrides(overrides: Sequence[str]) -> Overrides:
    """Parse `key=value` texts; a value is JSON, or a plain text.

    Raises:
        ConfigError: one has no key or no value.
    """
    parsed: Overrides = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip().removeprefix("++").removeprefix("+")
        if not equals or not key:
            raise ConfigError(
                f"invalid trainer.overrides {text!r}: expected key=value, such as "
                "actor_rollout_ref.actor.clip_ratio_high=0.28"
            )
        try:
            parsed[key] = json.loads(value)
        except ValueError:
            parsed[key] = value
    return parsed


def flatten(config: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield a nested config as `key=value` texts.

    Raises:
        ConfigError: a value is not JSON.
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            try:
                yield f"{prefix}{key}={json.dumps(value)}"
            except TypeError as error:
                raise ConfigError(
                    f"{prefix}{key} is {type(value).__name__}, not a JSON value"
                ) from error


def check_contradictions(own: Overrides) -> None:
    """Raise ConfigError for keys of verl that a setting of whet, or its design, decides."""
    for key in own:
        if key in DECIDED:
            raise ConfigError(f"trainer.overrides sets {key!r}, which is {DECIDED[key]}: set that")
        if key in FIXED:
            raise ConfigError(f"trainer.overrides cannot set {key!r}: {FIXED[key]}")
        if key.split(".")[0] == SECTION:
            raise ConfigError(f"trainer.overrides cannot set {key!r}: the section is whet's own")
    estimator = own.get("algorithm.adv_estimator")
    loss = own.get("actor_rollout_ref.actor.policy_loss.loss_mode", LOSS)
    if estimator is not None and estimator not in ESTIMATORS.values() and loss == LOSS:
        raise ConfigError(
            f"algorithm.adv_estimator {estimator!r} of verl weighs every row alone, and the loss "
            f"{LOSS!r} expects advantages by rollout: also set "
            "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"
        )
    if loss != LOSS and estimator is None:
        raise ConfigError(
            f"the loss {loss!r} of verl expects unweighted advantages: also choose an "
            "algorithm.adv_estimator of verl, such as grpo or gae"
        )
