"""The version of verl that whet works with, and every name of it that whet uses."""

import importlib
import importlib.metadata

from whet.errors import ConfigError

SUPPORTED = "0.9.1"
"""Its names, row fields and tags were checked; verl renames things in patch releases."""

NAMES: dict[str, tuple[str, ...]] = {
    "verl.trainer.main_ppo": ("run_ppo", "TaskRunnerV1"),
    "verl.trainer.ppo.core_algos": (
        "register_adv_est",
        "register_policy_loss",
        "get_adv_estimator_fn",
        "get_policy_loss_fn",
    ),
    "verl.trainer.ppo.utils": ("need_critic", "need_reference_policy"),
    "verl.utils.config": ("validate_config",),
    "verl.utils.device": ("auto_set_device",),
    "verl.utils.tensordict_utils": ("get", "list_of_dict_to_tensordict"),
    "transfer_queue": ("init", "async_kv_put", "async_kv_batch_put"),
}
"""Names by module. `make test-verl` compares their signatures with what whet expects."""


def check_version() -> None:
    """Raise ConfigError, in one line, unless this environment has the version that is supported."""
    try:
        found = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"this Python has no verl: pip install verl=={SUPPORTED} in an environment of its own, "
            "and name its Python with trainer.python"
        ) from error
    if found != SUPPORTED:
        raise ConfigError(
            f"found verl {found}, expected {SUPPORTED}: pip install verl=={SUPPORTED}"
        )


def check_names() -> None:
    """Import verl. Raises ConfigError if it lacks a name that whet uses."""
    missing = [
        f"{module}.{name}"
        for module, names in NAMES.items()
        for name in names
        if not hasattr(importlib.import_module(module), name)
    ]
    if missing:
        raise ConfigError(
            f"verl {SUPPORTED} lacks {', '.join(missing)}: pip install verl=={SUPPORTED} again"
        )
