"""Plugin of verl: it imports this module in each of its processes, by the entry point of whet."""

from verl.trainer.ppo.core_algos import (
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)

from whet.trainers.verl.advantages import (
    build_estimator,
    build_loss,
    grpo,
    reinforce_plus_plus,
    rloo,
)
from whet.trainers.verl.settings import ESTIMATORS, LOSS

for _name, _baseline in {"grpo": grpo, "rloo": rloo, "reinforce++": reinforce_plus_plus}.items():
    register_adv_est(ESTIMATORS[_name])(build_estimator(_baseline))
register_policy_loss(LOSS)(build_loss(get_policy_loss_fn("vanilla")))
