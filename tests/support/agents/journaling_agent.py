"""An agent that writes every answer it got to a journal, durably, before it goes on.

It waits while there is a file `hold` beside its journal: so the test decides how far a run gets.
"""

import json
import os
from pathlib import Path
from typing import Any

import anyio
import httpx

from whet.types import Endpoint

FOLDER = Path(os.environ["JOURNAL"])
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
            body = reply.json()
            note(llm.base_url, body)
            drawn += sum(body["choices"][0]["token_ids"])
            content = body["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": "and then?"},
            ]
    return drawn % 11 / 10


def note(base_url: str, body: dict[str, object]) -> None:
    """Write an answer to the disk, in a file of this process: a kill may tear a line."""
    line = json.dumps({"url": base_url, "reply": body}) + "\n"
    with (FOLDER / f"journal-{os.getpid()}.jsonl").open("a") as journal:
        journal.write(line)
        journal.flush()
        os.fsync(journal.fileno())
