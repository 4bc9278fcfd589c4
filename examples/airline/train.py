"""Train the assistant of an airline.

    python train.py warmup        # a model that knows the tools and not the policy: a few minutes
    python train.py train         # 8 epochs over 60 tasks, evaluated on 60 others before and after

A model that can already call tools needs no warm-up: `python train.py train --model FOLDER`.
"""

import argparse
import os
import sys
from pathlib import Path

from agent import AirlineDesk
from desk import tasks
from warmup import write_dialogues

import whet

WARMUP, RUN = "airline-warmup", "airline"
TASKS_PER_STEP = 20


def main() -> None:
    args = parse()
    folder = Path(args.dir)
    if args.part == "warmup":
        file = folder / f"airline-{args.dialogues}.jsonl"
        write_dialogues(file, args.dialogues)
        whet.sft(
            str(file),
            model=args.model or "tiny",
            name=WARMUP,
            dir=args.dir,
            trainer={"weights": "full"},
            adam={"lr": args.rate or 2e-3, "warmup_steps": 10, "schedule": "linear"},
        )
        return
    train, held_out = tasks("train")[: args.tasks], tasks("test")[: args.tasks]
    per_step = min(TASKS_PER_STEP, len(train))
    os.environ.setdefault("CUSTOMER_MODEL", "customer")  # the frozen policy below
    result = whet.train(
        AirlineDesk,
        train,
        held_out=held_out,
        model=args.model or str(folder / "runs" / WARMUP / "model"),
        name=RUN,
        dir=args.dir,
        seed=args.seed,
        policies={"assistant": {}, "customer": {"frozen": True}},
        steps=args.epochs * len(train) // per_step,
        tasks_per_step=per_step,
        group_size=args.group_size,
        trainer={"weights": "full"},
        adam={"lr": args.rate or 1e-4},
        evaluation={"samples": args.samples},
    )
    print(f"run folder {result.run}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["warmup", "train"])
    parser.add_argument("--dir", default=".whet", help="folder of runs (default .whet)")
    parser.add_argument(
        "--model", default=None, help="model to start from (default: tiny; then that of `warmup`)"
    )
    parser.add_argument(
        "--dialogues", type=int, default=1200, help="conversations of `warmup` (default 1200)"
    )
    parser.add_argument("--epochs", type=int, default=8, help="passes over the tasks (default 8)")
    parser.add_argument("--tasks", type=int, default=60, help="tasks of each half (default 60)")
    parser.add_argument("--group-size", type=int, default=8, help="attempts of a task (default 8)")
    parser.add_argument(
        "--rate", type=float, default=None, help="learning rate (default 2e-3, then 1e-4)"
    )
    parser.add_argument("--samples", type=int, default=4, help="of held-out tasks (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the run (default 0)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except whet.WhetError as error:
        sys.exit(f"airline: {error}")
