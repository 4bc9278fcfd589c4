"""The demo with three seeds: does the gain hold, and how long does it take?

    python bench/learning/demo_seeds.py [arithmetic|hello] [--seeds 0 1 2]

Prints before and after for each seed; exits 1 if a seed misses what the demo promises.
"""

import argparse
import json
import subprocess
import sys
import tempfile

LIMITS = {
    # demo: (least greedy gain, least greedy accuracy after, most seconds)
    "arithmetic": (0.30, 0.0, 300),
    "hello": (0.0, 0.95, 600),
}


def run(demo: str, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "whet", "demo", demo]
        command += ["--json", "--quiet", "--seed", str(seed), "--dir", directory]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def keeps_promise(demo: str, result: dict) -> bool:
    gain, after, seconds = LIMITS[demo]
    return (
        result["after"]["greedy"] - result["before"]["greedy"] >= gain
        and result["after"]["greedy"] >= after
        and result["gain_ci95"][0] > 0
        and result["seconds"] <= seconds
        and result["unproven_generations"] == 0
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("demo", nargs="?", choices=sorted(LIMITS), default="arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    print(f"{args.demo}: greedy accuracy on held-out tasks")
    print("seed  before   after   95 % interval of the gain   seconds")
    kept = True
    for seed in args.seeds:
        result = run(args.demo, seed)
        before, after = result["before"]["greedy"], result["after"]["greedy"]
        low, high = (100 * bound for bound in result["gain_ci95"])
        interval = f"[{low:+.1f}, {high:+.1f}] points"
        print(f"{seed:>4}  {before:6.1%}  {after:6.1%}   {interval:<26} {result['seconds']:8.0f}")
        kept &= keeps_promise(args.demo, result)
    print("every seed keeps the promise" if kept else "a seed misses the promise")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
