"""Train the math agent with GRPO; its OpenTelemetry spans are stored beside its tokens.

    python train.py --debug                  # three problems without training, every call shown
    python train.py                          # 8 steps
    python train.py --track tensorboard      # or wandb, mlflow

Every other setting is a config key, an argument of `whet.Trainer`.
"""

import argparse
import sys

from agent import math_agent

import whet
from whet.demos.problems import problems

TINY: dict = {"trainer": {"weights": "full"}, "adam": {"lr": 6e-4}}
"""Settings for the tiny model. Larger ones keep the defaults, adapters and a lower rate."""


def main() -> None:
    args = parse()
    trainer = whet.Trainer(
        algorithm="grpo",
        tracer="otel",
        n_workers=args.workers,
        model=args.model,
        steps=args.steps,
        tasks_per_step=args.tasks_per_step,
        dir=args.dir,
        name=args.name,
        tracking={"names": ["jsonl", *args.track]},
        **(TINY if args.model == "tiny" else {}),
    )
    train, held_out = problems("train", 500, 0), problems("test", args.held_out, 1)
    if args.debug:
        trainer.dev(math_agent, held_out)
    else:
        trainer.fit(math_agent, train, val_data=held_out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--debug", action="store_true", help="run three problems, do not train")
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a folder (default tiny)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps (default 8)")
    parser.add_argument("--tasks-per-step", type=int, default=8, help="problems a step (default 8)")
    parser.add_argument("--held-out", type=int, default=60, help="held-out problems (default 60)")
    parser.add_argument("--workers", type=int, default=8, help="attempts at once (default 8)")
    parser.add_argument("--track", nargs="*", default=[], help="tensorboard, wandb or mlflow")
    parser.add_argument("--dir", default=".whet", help="folder of runs (default .whet)")
    parser.add_argument("--name", default=None, help="name of the run")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except whet.WhetError as error:
        sys.exit(f"agent_framework_math: {error}")
