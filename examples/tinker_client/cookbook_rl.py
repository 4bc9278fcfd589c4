"""The RL loop of tinker-cookbook, unmodified, against `whet tinker-server`.

    whet tinker-server --model tiny        # and set the two variables it prints
    pip install tinker-cookbook==0.5.8     # in an environment of its own
    python cookbook_rl.py --model FOLDER --log cookbook.log --steps 12

The environment gives a reward for each even token id among eight.
"""

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path

import chz
import tinker
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult

SHOWN = ("env/all/reward/total", "optim/kl_sample_train_v1", "optim/entropy")


class EvenTokens(Env):
    """One answer, worth the share of its tokens that are even."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt

    async def initial_observation(self):
        return tinker.ModelInput.from_ints(self.prompt), []

    async def step(self, action, *, extra=None):
        return StepResult(
            reward=sum(token % 2 == 0 for token in action) / max(1, len(action)),
            episode_done=True,
            next_observation=tinker.ModelInput.from_ints([]),
            next_stop_condition=[],
        )


class Group(EnvGroupBuilder):
    """Eight answers to one prompt."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt

    async def make_envs(self):
        return [EvenTokens(self.prompt) for _ in range(8)]


class Prompts(RLDataset):
    """Four prompts for each step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def get_batch(self, index: int):
        return [Group([5, 17, 42 + place]) for place in range(4)]

    def __len__(self) -> int:
        return self.steps


@chz.chz
class Builder(RLDatasetBuilder):
    """Makes the dataset."""

    steps: int

    async def __call__(self):
        return Prompts(self.steps), None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = train.Config(
            learning_rate=2e-3,
            dataset_builder=Builder(steps=args.steps),
            model_name=args.model,
            recipe_name="even-tokens",
            max_tokens=8,
            log_path=folder,
            base_url=os.environ["TINKER_BASE_URL"],
            lora_rank=8,
            eval_every=0,
            save_every=5,
            loss_fn="ppo",
            num_groups_to_log=0,
        )
        asyncio.run(train.main(config))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
    kept = [{k: round(line[k], 4) for k in SHOWN if k in line} for line in lines]
    Path(args.log).write_text("".join(json.dumps(line) + "\n" for line in kept))


if __name__ == "__main__":
    main()
