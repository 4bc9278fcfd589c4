"""The client by which a runner reaches the service: it sends the question and scores the answer.

    whet train --service agent_client.py:AgentClient --tasks GSM8K/train.jsonl ...

AGENT_URL has the address of the service, http://127.0.0.1:8001/chat if it is not set.
"""

import os
import re

import whet

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(task, reply) -> float:
    """1.0 if the last number is the one behind #### in the gold answer; a little for any number."""
    found = last_number(reply["text"])
    if found == last_number(task["answer"].rpartition("####")[2]):
        return 1.0
    return 0.0 if found is None else 0.1


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


class AgentClient(whet.Service):
    """Sends the question to the service, and never the answer."""

    def __init__(self) -> None:
        super().__init__(
            os.environ.get("AGENT_URL", "http://127.0.0.1:8001/chat"), reward=score, max_turns=6
        )

    async def chat(self, trace_id, sampling_params, max_turns, *, llm, **sample):
        """Post `question` alone."""
        question = sample["question"]
        return await super().chat(trace_id, sampling_params, max_turns, llm=llm, question=question)
