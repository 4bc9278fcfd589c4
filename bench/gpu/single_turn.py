"""The agent of `rollouts.py`, in a module that runner processes can import."""

import os

from openai import AsyncOpenAI

import whet

TOKENS = int(os.environ.get("WHET_BENCH_TOKENS", "64"))
_client = AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0, timeout=600)


async def single_turn(task: dict, llm: whet.Endpoint) -> float:
    """One call, with one client for all rollouts of a process."""
    client = _client.with_options(base_url=llm.base_url, api_key=llm.api_key)
    reply = await client.chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": task["question"]}],
        max_tokens=TOKENS,
    )
    return digit_share(reply.choices[0].message.content or "")


def digit_share(text: str) -> float:
    """Something that differs between answers."""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))
