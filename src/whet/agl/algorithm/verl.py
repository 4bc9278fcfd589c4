"""`VERL(config)`: reinforcement learning by `whet.train`, with the keys of a VERL config."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from whet.agl.algorithm.base import Algorithm
from whet.errors import ConfigError

logger = logging.getLogger(__name__)

Setting = tuple[str, ...]
"""Path of a key of whet's config."""

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))

MAPPED: dict[str, Setting] = {
    f"{MODEL}.path": ("model",),
    f"{MODEL}.lora_alpha": ("trainer", "lora_alpha"),
    f"{MODEL}.enable_gradient_checkpointing": ("trainer", "gradient_checkpointing"),
    f"{ROLLOUT}.n": ("group_size",),
    f"{ROLLOUT}.temperature": ("runner", "temperature"),
    f"{ROLLOUT}.val_kwargs.temperature": ("evaluation", "temperature"),
    f"{ROLLOUT}.val_kwargs.n": ("evaluation", "samples"),
    f"{ACTOR}.optim.lr": ("adam", "lr"),
    f"{ACTOR}.optim.lr_warmup_steps": ("adam", "warmup_steps"),
    f"{ACTOR}.optim.weight_decay": ("adam", "weight_decay"),
    f"{ACTOR}.grad_clip": ("adam", "max_grad_norm"),
    f"{ACTOR}.clip_ratio_low": ("loss", "clip_low"),
    f"{ACTOR}.clip_ratio_high": ("loss", "clip_high"),
    f"{ACTOR}.clip_ratio_c": ("loss", "dual_clip"),
    f"{ACTOR}.entropy_coeff": ("loss", "entropy"),
    f"{ACTOR}.ppo_epochs": ("loop", "epochs"),
    "algorithm.norm_adv_by_std_in_grpo": ("algorithm", "divide_by_std"),
    "data.train_batch_size": ("tasks_per_step",),
    "data.seed": ("seed",),
    "trainer.experiment_name": ("name",),
    "trainer.project_name": ("tracking", "project"),
    "trainer.default_local_dir": ("dir",),
    "trainer.test_freq": ("evaluation", "every"),
    "trainer.save_freq": ("checkpoints", "every"),
    "trainer.max_actor_ckpt_to_keep": ("checkpoints", "keep"),
}
"""Keys with a counterpart in whet's config, which gets their value as it is."""

COMPUTED = (
    f"{MODEL}.lora_rank",
    f"{ACTOR}.clip_ratio",
    f"{ACTOR}.use_kl_loss",
    f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.ppo_mini_batch_size",
    "algorithm.adv_estimator",
    "data.max_prompt_length",
    "data.max_response_length",
    "trainer.logger",
    "trainer.total_epochs",
    "trainer.total_training_steps",
)
"""Keys that `_convert_computed` and `_count_steps` convert."""

OFF = ("algorithm.use_kl_in_reward",)
"""Keys without a counterpart that many configs set to False."""

PLACEMENT = (
    f"{ACTOR}.fsdp_config",
    f"{ACTOR}.strategy",
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.ppo_max_token_len",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.kl_loss_type",
    f"{ROLLOUT}.name",
    f"{ROLLOUT}.mode",
    f"{ROLLOUT}.gpu_memory_utilization",
    f"{ROLLOUT}.tensor_model_parallel_size",
    f"{ROLLOUT}.log_prob_micro_batch_size",
    f"{ROLLOUT}.engine_kwargs",
    f"{ROLLOUT}.multi_turn",
    f"{ROLLOUT}.enforce_eager",
    f"{ROLLOUT}.free_cache_engine",
    f"{MODEL}.use_remove_padding",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.hybrid_engine",
    "agentlightning",
    "data.truncation",
    "data.filter_overlong_prompts",
    "data.train_files",
    "data.val_files",
    "data.val_batch_size",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.critic_warmup",
    "trainer.val_before_train",
    "trainer.resume_mode",
    "ray_init",
    "ray_kwargs",
)
"""Prefixes of keys about processes and memory, which whet decides itself: they are left out."""

ESTIMATORS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++",
}
LOGGERS = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard", "console": None}


class VERL(Algorithm):
    """Trains the model of the config with whet's own trainer, on this machine.

    `whet.train` does the work: its folder has the checkpoints, the model and the report.
    """

    def __init__(
        self, config: Mapping[str, Any], trainer_cls: object = None, daemon_cls: object = None
    ) -> None:
        """Raises ConfigError for a key without a counterpart; the message names it."""
        super().__init__()
        if trainer_cls is not None or daemon_cls is not None:
            raise NotImplementedError("VERL: trainer_cls and daemon_cls are parts of verl itself")
        self._keys = _flatten(config)
        self.settings = _convert(self._keys)
        self.result: Any = None
        """What `whet.train` returned. Any: its type is imported with torch."""

    def train(
        self,
        agent: Callable[..., Any],
        tasks: Sequence[Any],
        held_out: Sequence[Any],
        **options: Any,
    ) -> Any:
        """Train the model behind an agent of whet. Returns the result of `whet.train`."""
        import whet  # noqa: PLC0415 - imports torch

        settings = dict(self.settings)
        settings["steps"] = _count_steps(self._keys, len(tasks), settings.get("tasks_per_step", 8))
        if not held_out:
            settings.pop("evaluation", None)
        self.result = whet.train(agent, tasks, held_out=held_out or None, **settings, **options)
        return self.result


def _convert(keys: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in keys.items():
        if key in MAPPED:
            if value is not None and not (key.endswith("_freq") and value <= 0):
                _set_path(settings, MAPPED[key], value)
        elif key in COMPUTED or (key in OFF and not value):
            pass
        elif any(key == p or key.startswith((f"{p}.", f"{p}_")) for p in PLACEMENT):
            ignored.append(key)
        else:
            raise ConfigError(
                f"VERL: the key {key!r} has no counterpart in whet: leave it out, or train with "
                "verl itself"
            )
    _convert_computed(keys, settings)
    if ignored:
        logger.warning("VERL: whet decides about processes and memory: ignored %s", ignored)
    return settings


def _convert_computed(keys: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Convert the keys of `COMPUTED`, of which several may make one setting."""
    settings.setdefault("runner", {}).setdefault("temperature", 1.0)  # verl's default
    rank = keys.get(f"{MODEL}.lora_rank")
    # Without a rank verl trains all weights, and the learning rate is meant for them.
    settings.setdefault("trainer", {}).update({"lora_rank": rank} if rank else {"weights": "full"})
    estimator = keys.get("algorithm.adv_estimator", "grpo")
    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"VERL: algorithm.adv_estimator {estimator!r} has no counterpart in whet: expected "
            f"{', '.join(ESTIMATORS)}"
        )
    _set_path(settings, ("algorithm", "name"), ESTIMATORS[estimator])
    if estimator == "reinforce_plus_plus_baseline":
        _set_path(settings, ("algorithm", "group_baseline"), True)
    if estimator == "grpo":  # verl's default
        settings["algorithm"].setdefault("divide_by_std", True)
    if keys.get(f"{ACTOR}.use_kl_loss"):
        _set_path(settings, ("loss", "kl"), keys.get(f"{ACTOR}.kl_loss_coef", 0.001))
    clip = keys.get(f"{ACTOR}.clip_ratio")
    if clip is not None:
        loss = settings.setdefault("loss", {})
        loss.setdefault("clip_low", clip)
        loss.setdefault("clip_high", clip)
    lengths = [keys.get(f"data.max_{part}_length") for part in ("prompt", "response")]
    if None not in lengths:
        _set_path(settings, ("engine", "max_context"), sum(cast(list[int], lengths)))
    mini = keys.get(f"{ACTOR}.ppo_mini_batch_size")
    batch = keys.get("data.train_batch_size")
    if mini is not None and batch is not None:
        _set_path(settings, ("loop", "mini_batches"), max(1, batch // mini))
    names = [_convert_logger(name) for name in _as_list(keys.get("trainer.logger", []))]
    if any(names):
        _set_path(settings, ("tracking", "names"), ["jsonl", *(name for name in names if name)])


def _convert_logger(name: str) -> str | None:
    if name not in LOGGERS:
        raise ConfigError(
            f"VERL: trainer.logger {name!r} has no counterpart in whet: expected "
            f"{', '.join(LOGGERS)}"
        )
    return LOGGERS[name]


def _count_steps(keys: Mapping[str, Any], tasks: int, batch: int) -> int:
    limit = keys.get("trainer.total_training_steps")
    steps = keys.get("trainer.total_epochs", 1) * math.ceil(tasks / batch)
    if limit is None:
        return steps
    return min(steps, limit) if "trainer.total_epochs" in keys else limit


def _set_path(settings: dict[str, Any], path: Setting, value: Any) -> None:
    *sections, last = path
    for section in sections:
        settings = settings.setdefault(section, {})
    settings[last] = value


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= (
            _flatten(cast(Any, value), f"{name}.") if isinstance(value, Mapping) else {name: value}
        )
    return flat
