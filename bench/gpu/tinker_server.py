"""`whet tinker-server` on a GPU, asked by the real `tinker` client.

    python bench/gpu/tinker_server.py [--model smollm2] [--parts agree,speed,learn] [--steps 40]

agree: a server on the CPU trains adapters and saves them; servers on the GPU in fp32 and bf16 go on
    from its checkpoint. The same requests then give log-probabilities, losses and gradients, which
    are compared; and each server's sampled log-probabilities with its own trainer's.
speed: sample, train, publish; 512 rollouts of 64 tokens a step.
learn: RL on sums of two numbers up to 20, of which a quarter is held out; also the seconds that two
    of its steps take on the CPU.
Exits 1 if numbers are further apart than TOLERANCES, or RL adds less than 25 points.
"""

import argparse
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import common as gpu
import numpy as np
import tinker
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tinker import types

from whet.app.tinker_server.storage import Storage
from whet.gateway.messages import Message
from whet.gateway.templates.chat_template import ChatTemplate

KEY = "tml-of-the-bench"
os.environ["TINKER_TELEMETRY"] = "0"
LOSSES = ("cross_entropy", "importance_sampling")
RANK = 32
GOAL = 0.25


@dataclass
class Tolerance:
    """The allowed distance of a server from another in fp32 on the CPU."""

    logprob: float
    """The mean difference."""
    gradient: float
    """Of its difference, the norm over its own."""
    sampler: float
    """The mean difference between what a server sampled and what it trains."""


TOLERANCES = {"fp32": Tolerance(1e-4, 1e-3, 1e-4), "bf16": Tolerance(0.05, 0.15, 0.05)}


class Server:
    """`whet tinker-server` in a process of its own."""

    def __init__(self, args: argparse.Namespace, folder: Path, device: str, precision: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.name = f"{device} {precision}"
        command = [sys.executable, "-m", "whet", "tinker-server", "--model", args.model]
        command += ["--port", str(port), "--dir", str(folder), "--engine.device", device]
        command += ["--trainer.precision", precision, "--engine.kv-tokens", str(args.kv_tokens)]
        self._log = (args.out / "server.log").open("a")
        environment = {**os.environ, "TINKER_API_KEY": KEY}
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=self._log
        )
        while not self._answers():
            assert self._process.poll() is None, f"see {args.out / 'server.log'}"
            time.sleep(0.1)
        print(f"{self.name}: serves after {time.perf_counter() - began:.1f} s", flush=True)

    def __enter__(self) -> tinker.ServiceClient:
        self._client = tinker.ServiceClient(base_url=self.url, api_key=KEY)
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close("success").result()
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5).status == 200
        except OSError:
            return False


@dataclass
class ServerResults:
    """A server's results for the same requests."""

    logprobs: dict[str, NDArray] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, NDArray] = field(default_factory=dict)


# ----------------------------------------------------------------------------- agree


def agree(args: argparse.Namespace, folder: Path) -> bool:
    """Print how far the servers are apart; whether that is near enough."""
    prompts = gpu.prompts(gpu.model_folder(args.model), 8)
    with Server(args, folder, "cpu", "fp32") as service:
        training = service.create_lora_training_client(args.model, rank=RANK, seed=1)
        sampled = sample(training.save_weights_and_get_sampling_client(), prompts, 4, 32)
        for _ in range(3):  # adapters that add nothing have half a gradient
            training.forward_backward(examples(sampled, "cross_entropy"), "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=3e-4)).result()
        start = training.save_state("start").result().path
        sampled = sample(training.save_weights_and_get_sampling_client(), prompts, 4, 32)
        data = {loss: examples(sampled, loss) for loss in LOSSES}
        records = Storage(folder / "tinker")
        wanted = ask(service, records, start, data)
        print_own(service, start, prompts[:2], 4, 32, "cpu fp32")
    kept = True
    for precision, near in TOLERANCES.items():
        with Server(args, folder, args.device, precision) as service:
            found = ask(service, records, start, data)
            kept &= print_far(found, wanted, near, f"{args.device} {precision}")
            gap = print_own(service, start, prompts, 16, 64, f"{args.device} {precision}")
            kept &= gap < near.sampler and resumes(service, start, data, near)
    return kept


def ask(service: tinker.ServiceClient, records: Storage, start: str, data: dict) -> ServerResults:
    results = ServerResults()
    for loss in LOSSES:
        training = service.create_training_client_from_state(start)
        found = training.forward_backward(data[loss], loss).result()
        results.losses[loss] = found.metrics["loss:sum"]
        results.logprobs[loss] = np.concatenate(
            [output["logprobs"].data for output in found.loss_fn_outputs]
        )
        # With such an epsilon a first step of Adam subtracts the gradient itself.
        training.optim_step(types.AdamParams(learning_rate=1e4, eps=1e4)).result()
        stepped = training.save_state(f"stepped-{loss}").result().path
        before, after = (weights(records, path) for path in (start, stepped))
        results.gradients[loss] = np.concatenate([(before[n] - after[n]).ravel() for n in before])
    return results


def weights(records: Storage, path: str) -> dict[str, NDArray]:
    return load_file(records.find_folder(path) / "weights.safetensors")


def print_far(found: ServerResults, wanted: ServerResults, near: Tolerance, name: str) -> bool:
    kept = True
    for loss in LOSSES:
        off = np.abs(found.logprobs[loss] - wanted.logprobs[loss])
        ours, theirs = found.gradients[loss], wanted.gradients[loss]
        far = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        print(
            f"{name}, {loss}: loss {found.losses[loss]:.4f} for {wanted.losses[loss]:.4f}; "
            f"|log p| apart {off.mean():.2e}, at most {off.max():.2e} ({off.size} tokens); "
            f"gradient apart {far:.2e} of its norm {np.linalg.norm(theirs):.3f}",
            flush=True,
        )
        kept &= bool(off.mean() < near.logprob and far < near.gradient)
    return kept


def print_own(
    service: tinker.ServiceClient, start: str, prompts: list, count: int, length: int, name: str
) -> float:
    """The mean difference between a server's samplers and its trainer, on trained weights."""
    training = service.create_training_client_from_state(start)
    sampler = training.save_weights_and_get_sampling_client()
    sampled = sample(sampler, prompts, count, length)
    found = training.forward(examples(sampled, "cross_entropy"), "cross_entropy").result()
    mean, most, tokens = gap(sampled, found.loss_fn_outputs)
    prompt, answer, _ = sampled[0]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, *answer])).result()[1:]
    own = np.abs(np.array(scored) - np.array(found.loss_fn_outputs[0]["logprobs"].data))
    print(
        f"{name}: sampler and trainer {mean:.2e} apart, at most {most:.2e} ({tokens} tokens); "
        f"scorer and trainer {own.mean():.2e}",
        flush=True,
    )
    return mean


def resumes(service: tinker.ServiceClient, start: str, data: dict, near: Tolerance) -> bool:
    """Whether a state that was saved and loaded trains on as if nothing had been."""

    def step(training: tinker.TrainingClient) -> float:
        training.forward_backward(data["cross_entropy"], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        return training.forward(data["cross_entropy"], "cross_entropy").result().metrics["loss:sum"]

    first = service.create_training_client_from_state_with_optimizer(start)
    step(first)
    path = first.save_state("between").result().path
    went_on = step(first)
    first.load_state_with_optimizer(path).result()  # pyright: ignore[reportDeprecated]  # clients still call it
    loaded = step(first)
    other = step(service.create_training_client_from_state_with_optimizer(path))
    print(f"    a step later the loss is {went_on:.5f}, loaded {loaded:.5f}, elsewhere {other:.5f}")
    return max(abs(loaded - went_on), abs(other - went_on)) < near.logprob * abs(went_on)


# ----------------------------------------------------------------------------- of all parts

Sampled = list[tuple[list[int], list[int], list[float]]]


def sample(
    client: tinker.SamplingClient, prompts: list, count: int, length: int, **params: Any
) -> Sampled:
    """Prompt, answer and its log-probabilities; all prompts at once."""
    wanted = types.SamplingParams.model_validate({"max_tokens": length, "stop": [], **params})
    futures = [client.sample(types.ModelInput.from_ints(p), count, wanted) for p in prompts]
    return [
        (prompt, list(sequence.tokens), list(sequence.logprobs or ()))
        for prompt, future in zip(prompts, futures, strict=True)
        for sequence in future.result().sequences
    ]


def examples(sampled: Sampled, loss: str, advantages: list[float] | None = None) -> list:
    """Answers as datums; without advantages each is worth 1 or -0.5 in turn."""
    made = []
    for index, (prompt, answer, logprobs) in enumerate(sampled):
        tokens, before = [*prompt, *answer], [0.0] * (len(prompt) - 1)
        worth = advantages[index] if advantages else (1.0, -0.5)[index % 2]
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}  # lists become tensors
        if loss == "cross_entropy":
            inputs["weights"] = [*before, *[1.0] * len(answer)]
        else:
            inputs["logprobs"] = [*before, *logprobs]
            inputs["advantages"] = [*before, *[worth] * len(answer)]
        made.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return made


def gap(sampled: Sampled, found: list) -> tuple[float, float, int]:
    """The distance of a trainer's log-probabilities of answers from those at sampling."""
    off = np.concatenate(
        [
            np.abs(np.array(output["logprobs"].data)[len(prompt) - 1 :] - logprobs)
            for (prompt, _, logprobs), output in zip(sampled, found, strict=True)
        ]
    )
    return float(off.mean()), float(off.max()), off.size


@dataclass
class Loop:
    """Trains on what it samples, and keeps the time."""

    training: tinker.TrainingClient
    rate: float
    sampler: tinker.SamplingClient | None = None
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {"publish": [], "sample": [], "train": []}
    )
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between sampler and trainer, the mean of each step."""

    def step(self, prompts: list, group: int, length: int, reward, **params: object) -> float:
        """One update; returns the mean reward."""
        began = time.perf_counter()
        self.sampler = self.training.save_weights_and_get_sampling_client()
        published = time.perf_counter()
        sampled = sample(self.sampler, prompts, group, length, **params)
        done = time.perf_counter()
        rewards = [reward(index // group, answer) for index, (_, answer, _) in enumerate(sampled)]
        means = [fmean(rewards[i : i + group]) for i in range(0, len(rewards), group)]
        worth = [value - means[index // group] for index, value in enumerate(rewards)]
        weighted = [(one, value) for one, value in zip(sampled, worth, strict=True) if value]
        if weighted:
            data = examples(
                [one for one, _ in weighted], LOSSES[1], [value for _, value in weighted]
            )
            passed = self.training.forward_backward(data, LOSSES[1])
            self.training.optim_step(types.AdamParams(learning_rate=self.rate)).result()
            found = passed.result().loss_fn_outputs
            self.gaps.append(gap([one for one, _ in weighted], found)[0])
        self.seconds["publish"].append(published - began)
        self.seconds["sample"].append(done - published)
        self.seconds["train"].append(time.perf_counter() - done)
        self.tokens.append(sum(len(answer) for _, answer, _ in sampled))
        return fmean(rewards)

    def timing(self, skip: int) -> str:
        """The mean time of a step, without the first ones."""
        parts = {name: fmean(values[skip:]) for name, values in self.seconds.items()}
        whole, tokens = sum(parts.values()), fmean(self.tokens[skip:])
        split = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
        rate = f"{tokens / parts['sample']:.0f} sampled tokens/s, {tokens / whole:.0f} of the step"
        return f"{whole:.2f} s a step ({split}); {rate}"


# ----------------------------------------------------------------------------- speed, learn


def speed(args: argparse.Namespace, folder: Path) -> None:
    prompts = gpu.prompts(gpu.model_folder(args.model), 32)
    with Server(args, folder, args.device, "auto") as service:
        training = service.create_lora_training_client(args.model, rank=RANK, seed=1)
        loop = Loop(training, 1e-6)
        for _ in range(5):
            loop.step(prompts, 16, 64, lambda _, answer: fmean(t % 2 for t in answer))
        print(f"512 rollouts of 64 tokens: {loop.timing(skip=2)}", flush=True)
        print("    seconds of the first step", {n: round(v[0], 2) for n, v in loop.seconds.items()})


def learn(args: argparse.Namespace, folder: Path) -> bool:
    with Server(args, folder, args.device, "auto") as service:
        gain = learn_sums(service, args, args.steps, held_out=True)
    if args.cpu_steps:
        with Server(args, folder, "cpu", "fp32") as service:
            learn_sums(service, args, args.cpu_steps, held_out=False)
    return gain >= GOAL


def learn_sums(
    service: tinker.ServiceClient, args: argparse.Namespace, steps: int, *, held_out: bool
) -> float:
    template = ChatTemplate(gpu.model_folder(args.model))
    dice = random.Random(args.seed)
    sums = list(itertools.product(range(1, 21), range(1, 21)))
    dice.shuffle(sums)
    test, train = sums[:100], sums[100:]

    def prompt(pair: tuple[int, int]) -> list[int]:
        question = f"What is {pair[0]} + {pair[1]}? Answer with the number alone."
        messages = [Message("user", question)]
        return template.encode(template.render(messages, [], add_generation_prompt=True))

    def right(pair: tuple[int, int], answer: list[int]) -> float:
        numbers = re.findall(r"\d+", template.decode(answer))
        return float(bool(numbers) and numbers[-1] == str(sum(pair)))

    def accuracy(client: tinker.SamplingClient) -> float:
        found = sample(client, [prompt(p) for p in test], 1, 24, stop=None, temperature=0.0)
        return fmean(right(p, answer) for p, (_, answer, _) in zip(test, found, strict=True))

    training = service.create_lora_training_client(args.model, rank=RANK, seed=args.seed)
    loop = Loop(training, args.rate)
    before = accuracy(training.save_weights_and_get_sampling_client()) if held_out else 0.0
    rewards: list[float] = []
    for _ in range(steps):
        pairs = dice.sample(train, 16)
        prompts = [prompt(pair) for pair in pairs]
        score = lambda place, answer, pairs=pairs: right(pairs[place], answer)  # noqa: E731
        rewards.append(loop.step(prompts, 16, 24, score, stop=None))
    print("rewards", [round(reward, 3) for reward in rewards])
    print(f"256 rollouts a step: {loop.timing(skip=1)}; {sum(loop.tokens)} tokens sampled")
    print(
        f"sampler and trainer {fmean(loop.gaps):.1e} apart, at most {max(loop.gaps):.1e} in a step"
    )
    if not held_out:
        return 0.0
    after = accuracy(training.save_weights_and_get_sampling_client())
    print(f"held-out sums, greedy: {before:.0%} before, {after:.0%} after", flush=True)
    report = {"rewards": rewards, "seconds": loop.seconds, "tokens": loop.tokens, "gaps": loop.gaps}
    report |= {"before": before, "after": after}
    (args.out / "tinker-learn.json").write_text(json.dumps(report))
    return after - before


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default="agree,speed,learn")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cpu-steps", type=int, default=2)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--kv-tokens", type=int, default=262_144)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    gpu.head(f"whet tinker-server, tinker {tinker.__version__}, {args.model}, rank {RANK}")
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        if "agree" in args.parts:
            kept &= agree(args, Path(folder))
        if "speed" in args.parts:
            speed(args, Path(folder))
        if "learn" in args.parts:
            kept &= learn(args, Path(folder))
    print("the goals are kept" if kept else "a goal is missed")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
