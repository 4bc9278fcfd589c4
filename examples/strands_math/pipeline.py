"""Collect, train and evaluate a Strands agent, one after the other or all in one.

    python pipeline.py all                     # everything in this process
    python pipeline.py collect                 # rollouts with their token ids, in rollouts.jsonl
    python pipeline.py train                   # REINFORCE on exactly those tokens that are sampled
    python pipeline.py evaluate                # the base model against the trained one

    whet store                                 # or each part in a terminal of its own
    whet serve
    whet runner agent.py:solve
    python pipeline.py train --store http://127.0.0.1:4747

`--vllm URL` samples from a running vLLM instead of this process.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

from agent import solve

import whet
from whet.demos.problems import problems

RUN = "strands-math"
TINY: dict = {"trainer": {"weights": "full"}, "adam": {"lr": 6e-4}}
"""Settings for the tiny model. Others, and a vLLM, get the defaults: adapters at a lower rate."""


@whet.algorithm
async def collect(store, tasks, config):
    """Run the agent on every task; write what was sampled, and report accuracy and TITO rate."""
    ids = [f"problem-{number}" for number in range(len(tasks))]
    await store.enqueue(
        [whet.Rollout(id=id, group=id, task=task) for id, task in zip(ids, tasks, strict=True)]
    )
    await store.wait(ids)
    found = await store.trajectories(ids)
    calls = [call for trajectory in found for call in trajectory.calls]
    exact = [has_tokens(call) for call in calls]
    file = config.dir / "rollouts.jsonl"
    file.write_text("".join(json.dumps(as_line(trajectory)) + "\n" for trajectory in found))
    print(f"{len(found)} of {len(ids)} rollouts, {len(calls)} calls in {file}")
    print(f"accuracy {fmean(t.reward == 1 for t in found):.0%}, TITO rate {fmean(exact):.0%}")
    return fmean(exact)


def has_tokens(call):
    """Whether every generation of a call has token ids, with a log-probability for each."""
    return all(one.tokens and len(one.logprobs) == len(one.tokens) for one in call.generations)


def as_line(trajectory):
    """A rollout as JSON: for every call the ids that its prompt added, and those sampled."""
    calls = [
        {"new_prompt_token_ids": list(call.prompt_suffix), "token_ids": list(one.tokens)}
        for call in trajectory.calls
        for one in call.generations
    ]
    return {"task": trajectory.attempt.rollout.task, "reward": trajectory.reward, "calls": calls}


def main() -> None:
    args = parse()
    settings: dict = {"model": args.model, "dir": args.dir}
    if args.vllm:
        settings["engine"] = {"kind": "vllm", "urls": [args.vllm]}
    held_out = problems("test", args.held_out, 1)
    if args.part in ("all", "collect"):
        collect.run(solve, held_out, store=args.store, **settings)
    if args.part in ("all", "train"):
        whet.train(
            solve,
            problems("train", 500, 0),
            held_out=held_out if args.part == "train" else None,
            name=RUN,
            store=args.store,
            steps=args.steps,
            algorithm={"name": args.algorithm},
            **settings,
            **(TINY if args.model == "tiny" and not args.vllm else {}),
        )
    if args.part in ("all", "evaluate"):
        trained = str(Path(args.dir) / "runs" / RUN)
        whet.evaluate(solve, held_out, {"base": args.model, "trained": trained}, dir=args.dir)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["all", "collect", "train", "evaluate"])
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a folder (default tiny)")
    parser.add_argument("--algorithm", default="grpo", help="how to give credit (default grpo)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps (default 8)")
    parser.add_argument("--held-out", type=int, default=60, help="held-out problems (default 60)")
    parser.add_argument("--dir", default=".whet", help="folder of runs (default .whet)")
    parser.add_argument("--store", default=None, metavar="URL", help="store of `whet store`")
    parser.add_argument("--vllm", default=None, metavar="URL", help="sample from this vLLM")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except whet.WhetError as error:
        sys.exit(f"strands_math: {error}")
