"""The smallest task: answer with exactly the identity string you are given."""

import random
from typing import Literal

from openai import AsyncOpenAI

from whet.types import Endpoint

NAMES = ("Tom", "Ana", "Lee", "Mia", "Sam", "Eva", "Ben", "Zoe", "Kai", "Ida", "Max", "Uma")


def identities(split: Literal["train", "test"], count: int, seed: int) -> list[dict[str, str]]:
    """Distinct tasks such as `Mia955y`. Train has odd numbers and test even ones: none in both."""
    first = 101 if split == "train" else 100
    whole = [
        f"{name}{number}{letter}"
        for name in NAMES
        for number in range(first, 1000, 2)
        for letter in "xyz"
    ]
    return [{"identity": text} for text in random.Random(f"{split}/{seed}").sample(whole, count)]


async def say_it(task: dict[str, str], llm: Endpoint) -> float:
    """Ask once; the reward is whether the answer is the identity and nothing else."""
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=[
                {
                    "role": "user",
                    "content": f"Repeat exactly this and nothing else: {task['identity']}",
                }
            ],
            max_tokens=16,
        )
    return float((reply.choices[0].message.content or "").strip() == task["identity"])
