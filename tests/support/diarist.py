"""An agent that notes every answer it was given, durably, before it goes on. Run by the tests.

It waits while there is a file `hold` beside its diary: so the test decides how far a run gets.
"""

import json
import os
from pathlib import Path
from typing import Any

import anyio
import httpx

from whet.types import Endpoint

FOLDER = Path(os.environ["DIARY"])
TURNS = 2
PACE_S = 0.2


async def answer(task: str, llm: Endpoint) -> float:
    """Ask twice; any difference between samples will do as a reward."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    drawn = 0
    # No certificates: reading them takes longer than all the rest.
    async with httpx.AsyncClient(base_url=llm.base_url + "/", timeout=120, verify=False) as client:
        for _ in range(TURNS):
            await anyio.sleep(PACE_S)
            while await anyio.Path(FOLDER / "hold").exists():  # noqa: ASYNC110 - by another process
                await anyio.sleep(PACE_S)
            reply = await client.post(
                "chat/completions",
                headers={"Authorization": f"Bearer {llm.api_key}"},
                json={
                    "model": llm.model,
                    "messages": messages,
                    "max_tokens": 6,
                    "return_token_ids": True,
                },
            )
            reply.raise_for_status()
            said = reply.json()
            note(llm.base_url, said)
            drawn += sum(said["choices"][0]["token_ids"])
            content = said["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": "and then?"},
            ]
    return drawn % 11 / 10


def note(base_url: str, said: dict[str, object]) -> None:
    """On disk when it returns; a file of its own for each process, since a kill may tear a line."""
    line = json.dumps({"url": base_url, "reply": said}) + "\n"
    with (FOLDER / f"diary-{os.getpid()}.jsonl").open("a") as diary:
        diary.write(line)
        diary.flush()
        os.fsync(diary.fileno())
