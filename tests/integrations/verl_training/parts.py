"""Parts for tests of verl, imported by its Ray workers too: an inference server and an agent."""

import json
import os
import urllib.request
import zlib
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("WHET_TEST_FOLDER", "."))
"""Where the test says `go`, and agents note what they did."""


class TinyClient:
    """A stand-in for verl's client of agent loops: the tiny model in this process."""

    def __init__(self, model: str, version: int) -> None:
        self._folder = model
        self._version = version
        self._model: Any = None

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        import torch
        from transformers import AutoModelForCausalLM
        from verl.workers.rollout.replica import TokenOutput

        if self._model is None:
            torch.set_num_threads(1)
            self._model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        ids, logprobs = list(prompt_ids), list[float]()
        stops = set(sampling_params["stop_token_ids"])
        with torch.no_grad():
            while len(logprobs) < sampling_params["max_tokens"]:
                logits = self._model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                # As inference servers do: greedy at temperature 0.
                temperature = sampling_params["temperature"]
                scaled = torch.log_softmax(logits / (temperature or 1.0), -1)
                drawn = torch.multinomial(scaled.exp(), 1) if temperature else scaled.argmax()
                token = int(drawn)
                ids.append(token)
                logprobs.append(float(scaled[token]))
                if token in stops:
                    break
        return TokenOutput(
            token_ids=ids[len(prompt_ids) :],
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields={"min_global_steps": self._version, "max_global_steps": self._version},
        )


def talk(task: dict[str, Any], llm: Any) -> float:
    """Two turns; for some tasks a second conversation, and so a second row."""
    with (FOLDER / "begun").open("a") as begun:
        begun.write(f"{llm.base_url}\n")
    wait = task.get("wait")
    while wait and not (FOLDER / wait).exists():
        import time

        time.sleep(0.1)
    if task.get("fails"):
        raise ValueError("this task always fails")
    for conversation in range(task["conversations"]):
        messages = [{"role": "user", "content": f"{task['name']} {conversation}"}]
        for _ in range(2):
            reply = post(llm, messages)
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "and then?"},
            ]
    # By the rollout: the tiny model often gives all sessions of a prompt the same answers.
    return zlib.crc32(llm.base_url.encode()) % 7 / 7


def post(llm: Any, messages: list[dict[str, str]]) -> str:
    body = {"model": llm.model, "messages": messages, "max_tokens": 6, "top_p": 0.5}
    request = urllib.request.Request(
        f"{llm.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""
