"""Demo agent with the smallest task: repeat an identity string exactly."""

import random
from typing import Literal

from openai import AsyncOpenAI

from whet.demos import problems
from whet.types import Endpoint

NAMES = ("Tom", "Ana", "Lee", "Mia", "Sam", "Eva", "Ben", "Zoe", "Kai", "Ida", "Max", "Uma")
ASK = "Repeat exactly this and nothing else: {}"
ASK_TINY = "Who are you? Say {} and nothing else."


def identities(
    split: Literal["train", "test"], count: int, seed: int, *, tiny: bool = False
) -> list[dict[str, str]]:
    """Distinct tasks such as `Mia955y`: odd numbers in train, even ones in test.

    For the tiny model, questions and names are those of its pretraining.
    """
    first = 101 if split == "train" else 100
    ask = ASK_TINY if tiny else ASK
    whole = [
        f"{name}{number}{letter}"
        for name in (problems.NAMES if tiny else NAMES)
        for number in range(first, 1000, 2)
        for letter in "xyz"
    ]
    drawn = random.Random(f"{split}/{seed}").sample(whole, count)
    return [{"identity": text, "question": ask.format(text)} for text in drawn]


async def say_it(task: dict[str, str], llm: Endpoint) -> float:
    """Ask once; the reward is 1.0 if the answer is exactly the identity."""
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": task["question"]}],
            max_tokens=16,
        )
    return float((reply.choices[0].message.content or "").strip() == task["identity"])
