"""Train a model that agents ask at a vLLM itself, with no gateway in between.

    python learn.py http://127.0.0.1:8000 DIR

with `whet store` and `whet runner agent.py:solve --gateway none --tracer otel` beside it. Agents
tell the tokens of their calls by spans; each call is a row, with the log-probs that the weights
here give it. What is learned is an adapter. The vLLM loads it under a new name, by which the next
rollouts ask for it.
"""

import argparse
import json
import secrets
from urllib.request import Request, urlopen

import whet
from whet.algorithms.grpo import GRPO
from whet.app.tasks import training_plan
from whet.demos.problems import problems
from whet.loop import train
from whet.recorded import told_by_spans
from whet.runners.collect import QueueCollector
from whet.step import version_after

ENDPOINT = "vllm"
"""The resource that agents find as `llms["vllm"]`."""


class Served:
    """The trainer; publishing has the vLLM serve what was learned."""

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
        ask(f"{url}/load_lora_adapter", {"lora_name": name, "lora_path": str(self.folder / name)})
        if self.version:
            ask(f"{url}/unload_lora_adapter", {"lora_name": before})
        self.version, self.endpoint = version, {**self.endpoint, "model": name}
        await self.store.publish(ENDPOINT, self.endpoint)


class FromSpans(QueueCollector):
    """Groups whose calls are those that spans tell."""

    def __init__(self, store, scorer, served):
        super().__init__(queue=store, log=store, resources={ENDPOINT: "latest"})
        self.store, self.scorer, self.served = store, scorer, served

    async def collect(self, rollouts):
        return [
            await told_by_spans(group, self.store, self.scorer, version=self.served.version)
            for group in await super().collect(rollouts)
        ]


@whet.algorithm
async def learn(store, tasks, trainer, scorer, config):
    folder = config.dir.absolute() / "runs" / config.name
    endpoint = (await store.latest(ENDPOINT)).value
    served = Served(trainer, store, endpoint, folder / "served")
    if version := version_after(await store.steps()):  # started again
        await served.serve(version)
    steps = train(
        training_plan(tasks, config),
        config,
        checkpoints=folder / "checkpoints",
        collector=FromSpans(store, scorer, served),
        algorithm=GRPO(config.algorithm),
        trainer=served,
        log=store,
    )
    async for record in steps:
        told = record.metrics
        print(
            f"step {record.step + 1}: reward {told['reward']:.2f}, {told['calls']:.0f} calls, "
            f"{told['rows']:.0f} rows, {told['unproven_rows']:.0f} unproven",
            flush=True,
        )


def ask(url, body=None):
    request = Request(url, json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    with urlopen(request) as reply:
        said = reply.read()
    return json.loads(said) if said.startswith(b"{") else said


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vllm", help="URL")
    parser.add_argument("model", help="folder of the model it serves")
    parser.add_argument("--store", default="http://127.0.0.1:4747")
    parser.add_argument("--name", default="default", help="run of the store [default]")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    [base, *_] = ask(f"{args.vllm}/v1/models")["data"]
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
