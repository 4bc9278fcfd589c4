"""Our numbers beside those that TRL's trainers compute for the same rewards."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

import whet
from support.store.steps import advantages
from whet.algorithms.grpo import GRPO
from whet.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from whet.algorithms.rloo import RLOO
from whet.config import AlgorithmConfig
from whet.protocols import Algorithm

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

REWARDS = [(1.0, 0.0, 0.0, 0.5), (0.25, 2.0, -1.0, 0.75)]
FLAT = [reward for group in REWARDS for reward in group]
LEFT = [reward - fmean(group) for group in REWARDS for reward in group]
TINY = Path(whet.__file__).parent / "demos" / "tiny"
TRL_EPSILON = 1e-4
"""Beside TRL's standard deviations; ours is smaller."""


@pytest.fixture
def trained(tmp_path: Path) -> Any:  # Any: TRL is imported by name
    """One step of a TRL trainer on a tiny model; gives the advantages it used."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    def train(kind: str, **settings: object) -> list[list[float]]:
        config = getattr(trl, f"{kind}Config")(
            output_dir=str(tmp_path),
            per_device_train_batch_size=len(FLAT),
            num_generations=len(REWARDS[0]),
            max_completion_length=2,
            max_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            **settings,
        )

        def reward(completions: Sequence[object], **_: object) -> list[float]:
            return FLAT[: len(completions)]

        trainer = getattr(trl, f"{kind}Trainer")(
            model=str(TINY),
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["one", "two"] * 4}),
        )
        trainer.train()
        found = list(trainer._logs["advantages"])
        size = len(REWARDS[0])
        return [found[i : i + size] for i in range(0, len(found), size)]

    return train


@pytest.mark.parametrize(
    ("kind", "settings", "algorithm", "stretch"),
    [
        ("GRPO", {"scale_rewards": "none"}, GRPO(AlgorithmConfig()), 1.0),
        ("GRPO", {"scale_rewards": "group"}, GRPO(AlgorithmConfig(divide_by_std=True)), 1.0),
        ("RLOO", {}, RLOO(AlgorithmConfig()), 1.0),
        (
            "GRPO",
            {"scale_rewards": "batch"},
            ReinforcePlusPlus(AlgorithmConfig(group_baseline=True)),
            # TRL's deviation is that of the rewards, the paper's of what the means leave of them.
            stdev(LEFT) / stdev(FLAT),
        ),
    ],
    ids=["grpo", "grpo by std", "rloo", "reinforce++ with group baselines"],
)
async def test_advantages_are_those_of_trl(
    trained: Any, kind: str, settings: dict[str, object], algorithm: Algorithm, stretch: float
) -> None:
    ours = await advantages(algorithm, REWARDS)
    for group, theirs in zip(ours, trained(kind, **settings), strict=True):
        stretched = [value * stretch for value in group]
        assert stretched == pytest.approx(theirs, rel=5 * TRL_EPSILON)
