"""verl's own trainer: the checks of its config, and its run."""

from typing import Any

from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from whet.errors import ConfigError, boundary


def check_config(config: Any) -> None:
    """Let verl validate its config, which needs no Ray. Raises ConfigError with its reason."""
    with boundary(ConfigError, "verl refuses the config"):
        auto_set_device(config)
        validate_config(
            config=config,
            use_reference_policy=need_reference_policy(config),
            use_critic=need_critic(config),
        )


def launch(config: Any) -> None:
    """Run verl's trainer to its end, in its Ray cluster."""
    run_ppo(config, task_runner_class=TaskRunnerV1)
