"""Agents of `path.py`, in a module that runner processes can import."""

from openai import AsyncOpenAI

import whet

TOKENS = 64
_client = AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0, timeout=600)


async def shared_client(task: dict, llm: whet.Endpoint) -> float:
    """Two calls, with one client for all rollouts of a process."""
    client = _client.with_options(base_url=llm.base_url, api_key=llm.api_key)
    return await _converse(client, task, llm)


async def own_client(task: dict, llm: whet.Endpoint) -> float:
    """Two calls, with a client for each rollout, as most agents build it."""
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, timeout=600)
    async with client:
        return await _converse(client, task, llm)


async def _converse(client: AsyncOpenAI, task: dict, llm: whet.Endpoint) -> float:
    messages: list = [{"role": "user", "content": task["question"]}]
    text = ""
    for _ in range(2):
        reply = await client.chat.completions.create(
            model=llm.model, messages=messages, max_tokens=TOKENS
        )
        text = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
    return len(text) % 10 / 10  # differs between rollouts, also where tokens are random
