"""Train a model that agents call at a vLLM directly, with no gateway in between.

    python train.py http://127.0.0.1:8000 DIR

with `whet store` and `whet runner agent.py:solve --gateway none --tracer otel` beside it. Agents
record the token ids of their calls in spans; each call is a row, with the log-probs that the
weights in this process give it. The result of a step is an adapter, which the vLLM loads under a
new name; the next rollouts ask for that name.
"""

import argparse
import json
import secrets
from typing import Any
from urllib.request import Request, urlopen

import whet
from whet.demos.problems import problems

ENDPOINT = "vllm"
"""The resource that agents get as `llms["vllm"]`."""


class ServingTrainer:
    """The trainer; publishing makes the vLLM serve the new adapter."""

    def __init__(self, trainer, store, endpoint, folder):
        self.trainer, self.store, self.endpoint, self.folder = trainer, store, endpoint, folder
        self.version = 0

    def __getattr__(self, name):
        return getattr(self.trainer, name)

    async def publish(self):
        await self.serve(await self.trainer.publish())
        return self.version

    async def serve(self, version):
        url, before = self.endpoint["base_url"], self.endpoint["model"]
        name = f"whet-{version}-{secrets.token_hex(2)}"
        await self.trainer.export(self.folder / name)
        post(f"{url}/load_lora_adapter", {"lora_name": name, "lora_path": str(self.folder / name)})
        if self.version:
            post(f"{url}/unload_lora_adapter", {"lora_name": before})
        self.version, self.endpoint = version, {**self.endpoint, "model": name}
        await self.store.publish(ENDPOINT, self.endpoint)


class SpanCollector(whet.QueueCollector):
    """Collects groups whose calls are read from spans."""

    def __init__(self, store, scorer, trainer):
        super().__init__(queue=store, log=store, resources={ENDPOINT: "latest"})
        self.store, self.scorer, self.trainer = store, scorer, trainer

    async def collect(self, rollouts) -> list[whet.Group]:
        return [
            await whet.add_calls_from_spans(
                group, self.store, self.scorer, version=self.trainer.version
            )
            for group in await super().collect(rollouts)
        ]


@whet.algorithm
async def learn(store, tasks, trainer, scorer, config):
    folder = config.dir.absolute() / "runs" / config.name
    endpoint = (await store.latest(ENDPOINT)).value
    serving: Any = ServingTrainer(trainer, store, endpoint, folder / "served")
    if done := await store.steps():  # resumed
        await serving.serve(done[-1].version)
    steps = whet.training_loop(
        whet.plan_rollouts(tasks, config),
        config,
        checkpoints=folder / "checkpoints",
        collector=SpanCollector(store, scorer, serving),
        algorithm=whet.build_algorithm(config),
        trainer=serving,
        log=store,
    )
    async for record in steps:
        metrics = record.metrics
        print(
            f"step {record.step + 1}: reward {metrics['reward']:.2f}, "
            f"{metrics['calls']:.0f} calls, {metrics['rows']:.0f} rows, "
            f"{metrics['unproven_generations']:.0f} unproven",
            flush=True,
        )


def post(url, body=None):
    """Call the vLLM; without a body, as GET."""
    request = Request(url, json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    with urlopen(request) as response:
        text = response.read()
    return json.loads(text) if text.startswith(b"{") else text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vllm", help="URL of the vLLM")
    parser.add_argument("model", help="folder of the model it serves")
    parser.add_argument("--store", default="http://127.0.0.1:4747", help="URL of `whet store`")
    parser.add_argument("--name", default="default", help="name of the run (default 'default')")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps (default 8)")
    args = parser.parse_args()
    [base, *_] = post(f"{args.vllm}/v1/models")["data"]
    learn.run(
        tasks=problems("train", 200, 0),
        resources={
            ENDPOINT: {"base_url": f"{args.vllm}/v1", "api_key": "none", "model": base["id"]}
        },
        store=args.store,
        name=args.name,
        model=args.model,
        steps=args.steps,
        adam={"lr": 2e-3},
    )
