"""Failure rewards: does a model learn not to break its agent?

    python bench/learning/failure_rewards.py [--steps 16] [--seed 0]

The agent parses what the tiny model answers and raises where it is not an identity such as
`Tom417x`. Trains twice, without and with `failure_reward.agent`, each rollout tried once; prints
the share of failed rollouts in the first and the last quarter of the steps. Exits 1 unless failure
rewards bring it below a third of what it was.
"""

import argparse
import re
import sys
import tempfile
from statistics import fmean

from openai import AsyncOpenAI

import whet
from whet.demos.hello import identities
from whet.types import Endpoint

IDENTITY = re.compile(r"[A-Z][a-z]+\d{3}[xyz]")


async def parse_it(task: dict[str, str], llm: Endpoint) -> float:
    """Ask once and parse the answer; 1.0 if it is right. Raises ValueError if it does not parse."""
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": task["question"]}],
            max_tokens=16,
        )
    answer = (reply.choices[0].message.content or "").strip()
    if not IDENTITY.fullmatch(answer):
        raise ValueError(f"not an identity: {answer!r}")
    return float(answer == task["identity"])


def failed_shares(reward: float | None, steps: int, seed: int) -> list[float]:
    """Train, and return the share of failed rollouts of each step."""
    with tempfile.TemporaryDirectory() as directory:
        result = whet.train(
            parse_it,
            identities("train", 512, seed, tiny=True),
            dir=directory,
            steps=steps,
            seed=seed,
            adam={"lr": 5e-4},
            runner={"max_attempts": 1},
            failure_reward={} if reward is None else {"agent": reward},
            quiet=True,
        )
    return [s.metrics["failed_rollouts"] / s.metrics["rollouts"] for s in result.steps]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    quarter = max(1, args.steps // 4)
    print("| failure_reward.agent | failed rollouts, first quarter | last quarter | ratio |")
    print("|---|---|---|---|")
    ratio = 1.0
    for reward in (None, -1.0):
        shares = failed_shares(reward, args.steps, args.seed)
        first, last = fmean(shares[:quarter]), fmean(shares[-quarter:])
        ratio = last / first if first else 0.0
        name = "not set" if reward is None else f"{reward:g}"
        print(f"| {name} | {first:.1%} | {last:.1%} | {ratio:.2f} |", flush=True)
    return 0 if ratio < 1 / 3 else 1


if __name__ == "__main__":
    sys.exit(main())
