"""Overfitting: is the best checkpoint kept, and does early stopping end the run?

    python bench/learning/overfitting.py [--lr 2e-3] [--steps 12] [--patience 3] [--seed 0]

The tiny model imitates its own right answers to one task, to repeat an identity such as `Tom417x`:
it learns to repeat any, then to say that one whatever is asked. Prints the reward of each step on
the task, sampled, and on held-out identities, at temperature 0.
Exits 1 unless the held-out reward fell from its best, training stopped by itself, the checkpoints
of the best and of the last step are there, and the run's model is that of the best.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import whet
from whet.demos.hello import identities, say_it


def train(directory: Path, args: argparse.Namespace) -> whet.Result:
    return whet.train(
        say_it,
        identities("train", 1, args.seed, tiny=True),
        held_out=identities("test", args.held_out, args.seed, tiny=True),
        dir=str(directory),
        name="overfitting",
        seed=args.seed,
        steps=args.steps,
        tasks_per_step=1,
        group_size=16,
        trainer={"weights": "full"},
        adam={"lr": args.lr},
        algorithm={"name": "positive"},
        loss={"name": "cross_entropy"},
        evaluation={"every": 1, "patience": args.patience, "samples": 0},
        quiet=True,
    )


def find_faults(result: whet.Result, held_out: list[float], kept: set[str]) -> list[str]:
    """The failed checks of a result."""
    best = held_out.index(max(held_out))
    expected = {f"step-{best:06d}", f"step-{len(held_out) - 1:06d}"}
    checks = {
        "the held-out reward did not fall": held_out[-1] < held_out[best],
        "training did not stop by itself": result.stopped is not None,
        f"found the checkpoints {sorted(kept)}, expected {sorted(expected)}": kept == expected,
        f"the model is of step {result.model_step}": result.model_step == best + 1,
    }
    return [fault for fault, holds in checks.items() if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = train(Path(directory), args)
        kept = {folder.name for folder in (result.run / "checkpoints").iterdir()}
    held_out = [step.metrics["eval/greedy"] for step in result.steps]
    print("| step | training task | held-out tasks |")
    print("|---|---|---|")
    for step, reward in zip(result.steps, held_out, strict=True):
        print(f"| {step.step + 1} | {step.metrics.get('reward', 0.0):.2f} | {reward:.2f} |")
    print(f"stopped: {result.stopped}; model of step {result.model_step}; kept {sorted(kept)}")
    faults = find_faults(result, held_out, kept)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
