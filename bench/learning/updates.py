"""Rollouts that the demo needs to reach a reward, by updates a step.

    python bench/learning/updates.py [--target 0.8] [--steps 24] [--seeds 0 1]
        [--variants 1 2 4 2x2]

A variant is `loop.mini_batches`, or `mini_batches x epochs`. Every variant has the demo's model,
tasks, learning rate and rollouts a step; the reward is the mean of the last three steps, sampled.
Exits 1 if no variant with several updates needs fewer rollouts than one update a step.
"""

import argparse
import sys
import tempfile
from statistics import fmean

import whet
from whet.demos import arithmetic, problems

WINDOW = 3


def rewards(variant: str, seed: int, steps: int) -> list[float]:
    """Mean reward of each step."""
    mini_batches, _, epochs = variant.partition("x")
    with tempfile.TemporaryDirectory() as directory:
        result = whet.train(
            arithmetic.solve,
            [*problems.problems("train", 2000, seed)],
            dir=directory,
            seed=seed,
            steps=steps,
            tasks_per_step=8,
            group_size=8,
            trainer={"weights": "full", "micro_batch_tokens": 4096},
            adam={"lr": 3e-4},
            loop={"mini_batches": int(mini_batches), "epochs": int(epochs or 1)},
            quiet=True,
        )
    return [record.metrics["reward"] for record in result.steps]


def steps_until(found: list[float], target: float) -> int | None:
    """Steps until the mean of the last three rewards is at the target."""
    for step in range(WINDOW, len(found) + 1):
        if fmean(found[step - WINDOW : step]) >= target:
            return step
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--variants", nargs="+", default=["1", "2", "4", "2x2"])
    args = parser.parse_args()
    print(f"rollouts until a reward of {args.target}, for seeds {args.seeds}; last reward")
    needed: dict[str, float] = {}
    for variant in args.variants:
        curves = [rewards(variant, seed, args.steps) for seed in args.seeds]
        reached = [steps_until(curve, args.target) for curve in curves]
        last = fmean(fmean(curve[-WINDOW:]) for curve in curves)
        needed[variant] = fmean(args.steps + 1 if n is None else n for n in reached)
        shown = ", ".join("not reached" if n is None else str(64 * n) for n in reached)
        print(f"{variant:>6}  {shown:<24} {last:.2f}", flush=True)
    one, *others = needed.values()
    return 0 if others and min(others) < one else 1


if __name__ == "__main__":
    sys.exit(main())
