"""Every name of verl and its queue that whet uses, with the parameters it was written for.

A new release of verl that fails here needs a look at the code that calls the name.
"""

import importlib
import inspect

import pytest

pytest.importorskip("verl", reason="run `make test-verl`")

from whet.trainers.verl.version import NAMES, check_names, check_version

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

PARAMETERS = {
    "verl.trainer.main_ppo.run_ppo": ["config", "task_runner_class"],
    "verl.trainer.main_ppo.TaskRunnerV1": ["args", "kwargs"],
    "verl.trainer.ppo.core_algos.register_adv_est": ["name_or_enum"],
    "verl.trainer.ppo.core_algos.register_policy_loss": ["name"],
    "verl.trainer.ppo.core_algos.get_adv_estimator_fn": ["name_or_enum"],
    "verl.trainer.ppo.core_algos.get_policy_loss_fn": ["name"],
    "verl.trainer.ppo.utils.need_critic": ["config"],
    "verl.trainer.ppo.utils.need_reference_policy": ["config"],
    "verl.utils.config.validate_config": ["config", "use_reference_policy", "use_critic"],
    "verl.utils.device.auto_set_device": ["config"],
    "verl.utils.tensordict_utils.get": ["tensordict", "key", "default"],
    "verl.utils.tensordict_utils.list_of_dict_to_tensordict": ["list_of_dicts"],
    "transfer_queue.init": ["conf"],
    "transfer_queue.async_kv_put": ["key", "partition_id", "fields", "tag", "data_parser"],
    "transfer_queue.async_kv_batch_put": ["keys", "partition_id", "fields", "tags", "data_parser"],
}


def test_every_name_has_the_parameters_it_had() -> None:
    check_version()
    check_names()
    found = {
        f"{module}.{name}": list(
            inspect.signature(getattr(importlib.import_module(module), name)).parameters
        )
        for module, names in NAMES.items()
        for name in names
    }
    assert found == PARAMETERS
