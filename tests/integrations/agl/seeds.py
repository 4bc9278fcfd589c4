"""The programs of the field that are written for Agent Lightning, with one import changed.

Each is as its README has it; where a README shows an agent SDK, the plain OpenAI client stands in.
"""

import asyncio
import json
import re
import sys
from collections import Counter
from typing import Any

from openai import AsyncOpenAI, OpenAI

import whet.agl as agl
from whet.agl import LLM, Dataset, Trainer, rollout
from whet.agl.algorithm.verl import VERL

# ------------------------------------------------ a driver of its own, which collects and counts


@agl.rollout
async def collect_rollout(task: str, llm: agl.LLM) -> float:
    """Solve a problem, and emit the reward besides returning it."""
    async with AsyncOpenAI(base_url=llm.endpoint, api_key="EMPTY") as client:
        reply = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task}], max_tokens=8
        )
    reward = 1.0 if reply.choices[0].message.content else 0.0
    agl.reward.emit_reward(reward)
    return reward


collected: dict[str, Any] = {}


@agl.algorithm  # pyright: ignore[reportCallIssue]  # a module that is a decorator too
async def collect_algorithm(store: agl.LightningStore) -> None:
    """Enqueue problems, wait, and read the spans."""
    rollout_ids: list[str] = []
    for number in range(3):
        added = await store.enqueue_rollout(collect_rollout, task=f"What is {number} + 1?")
        rollout_ids.append(added.rollout_id)
    completed = await store.wait_for_rollouts(rollout_ids)
    spans = await store.query_spans(rollout_ids)
    collected["statuses"] = [each.status for each in completed]
    collected["rewards"] = [value for s in spans if (value := agl.get_reward_value(s)) is not None]


# ------------------------------------------------ a math agent that VERL trains

TaskType = Any
seen = Counter[str]()


def score(question: str, answer: str) -> float:
    """Alternate, so that a group has a signal whatever the model samples."""
    seen[question] += 1
    return float(seen[question] % 2)


@rollout
async def math_agent(task: TaskType, llm: LLM) -> float:
    """Solve a problem and return the score; the API key is whatever the program has."""
    async with AsyncOpenAI(api_key="your-api-key", base_url=llm.endpoint) as client:
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": task["question"]}],
            temperature=llm.sampling_parameters.get("temperature", 0.0),
            max_tokens=4,
        )
    return score(task["question"], reply.choices[0].message.content or "")


def train_math_agent(folder: str, train: Dataset[Any], val: Dataset[Any]) -> Any:
    config = {
        "data": {"train_batch_size": 2},
        "trainer": {"total_epochs": 1, "n_gpus_per_node": 1, "default_local_dir": folder},
        "actor_rollout_ref": {"rollout": {"n": 4}, "model": {"path": "tiny"}},
    }
    tracer = agl.OtelTracer()
    trainer = Trainer(algorithm=VERL(config), tracer=tracer, n_workers=2)
    return trainer.fit(math_agent, train, val_data=val)


# ------------------------------------------------ a number-guessing agent, as a class

MAX_TURNS = 2


class GuessNumber(agl.LitAgent[Any]):
    """Guesses a number, with hints; synchronous, and with a method for validation."""

    def rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        llm = resources["main_llm"]
        assert isinstance(llm, agl.LLM)
        with OpenAI(base_url=llm.get_base_url(), api_key="EMPTY") as client:
            return self.guess(client, llm.model, task["answer"])

    def guess(self, client: OpenAI, model: str, answer: int) -> float:
        messages: list[Any] = [{"role": "user", "content": "Guess a number between 1 and 9."}]
        for _ in range(MAX_TURNS):
            reply = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
            content = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": content})
            found = re.search(r"\d+", content)
            guess = int(found[0]) if found else 0
            if guess == answer:
                return 1.0
            hint = "Too low" if guess < answer else "Too high"
            messages.append({"role": "user", "content": hint})
        agl.emit_message("out of turns")
        return score("guess", messages[-1]["content"]) / 2


def train_guess_number(folder: str, train: Dataset[Any]) -> Any:
    config = {
        "algorithm": {"adv_estimator": "rloo"},
        "data": {"train_batch_size": 1, "max_prompt_length": 96, "max_response_length": 32},
        "trainer": {"total_training_steps": 1, "default_local_dir": folder, "logger": ["console"]},
        "actor_rollout_ref": {
            "rollout": {"n": 4, "temperature": 1.0, "name": "vllm"},
            "actor": {"optim": {"lr": 1e-4}, "use_kl_loss": False},
            "model": {"path": "tiny"},
        },
    }
    return Trainer(algorithm=agl.VERL(config), n_runners=4).fit(GuessNumber(), train)


# ------------------------------------------------ the driver in processes of its own


async def run_as(role: str, store: agl.LightningStore, endpoint: str) -> None:
    """`python seeds.py runner|algo STORE ENDPOINT`, beside `agl store`."""
    if role == "runner":
        runner = agl.LitAgentRunner(tracer=agl.OtelTracer(), max_rollouts=3)
        with runner.run_context(agent=collect_rollout, store=store):
            await runner.iter()
    else:
        await store.add_resources({"llm": agl.LLM(endpoint=endpoint, model="m")})
        await collect_algorithm(store)
        sys.stdout.write(json.dumps(collected) + "\n")


async def main(role: str, address: str, endpoint: str) -> None:
    store = agl.LightningStoreClient(address)
    try:
        await run_as(role, store, endpoint)
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
