"""A planner and a worker, each a policy of its own on one base model, trained on one reward."""

import argparse

from openai import AsyncOpenAI

import whet

ROLES = ("planner", "worker")


async def ask(llm: whet.Endpoint, text: str) -> str:
    """Ask one policy a question."""
    async with AsyncOpenAI(
        base_url=llm.base_url, api_key=llm.api_key, max_retries=0, timeout=120
    ) as client:
        reply = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": text}], max_tokens=12
        )
    return reply.choices[0].message.content or ""


def share_of_digits(text: str) -> float:
    """The share of a text's characters that are digits."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


async def solve(task: str, llms: dict[str, whet.Endpoint]) -> float:
    """Let the planner answer in words and the worker in figures; the reward is a product."""
    plan = await ask(llms["planner"], task)
    answer = await ask(llms["worker"], task)
    return (1 - share_of_digits(plan)) * share_of_digits(answer)


def main() -> None:
    """Train both policies, or one of them while the other is frozen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--train", choices=(*ROLES, "both"), default="both", help="which policies to train"
    )
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps")
    parser.add_argument("--dir", default=".whet", help="folder of all runs")
    parser.add_argument("--name", default=None, help="name of the run")
    args = parser.parse_args()
    tasks = [f"What is {number} + {number + 1}?" for number in range(24)]
    whet.train(
        solve,
        tasks[:16],
        held_out=tasks[16:],
        policies={role: {"frozen": args.train not in ("both", role)} for role in ROLES},
        dir=args.dir,
        name=args.name,
        steps=args.steps,
        tasks_per_step=4,
        group_size=8,
        adam={"lr": 3e-3},
        evaluation={"samples": 4},
    )


if __name__ == "__main__":
    main()
