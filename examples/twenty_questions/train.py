"""Train a model to play 20 Questions, in several processes.

    python train.py warmup                    # a model that can talk the game: about 2 minutes
    python train.py dev                       # four games end to end, no training
    python train.py store                     # then each in a terminal of its own
    python train.py serve
    python train.py runner                    # in the environment that has CrewAI
    python train.py algo

`endpoint` serves a model or a run to `evaluate.py`, which plays with held-out words, or to any
other client of the OpenAI API.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

from game import TURNS, tasks
from warmup import write_games

AGENT = f"{Path(__file__).with_name('agent.py')}:guess"
RUN = "twenty-questions"
WARMUP = "twenty-questions-warmup"
STORE = "http://127.0.0.1:4747"
SETTINGS = (
    *("--trainer.weights", "full", "--adam.lr", "3e-4", "--algorithm.credit", "turn"),
    *("--tasks-per-step", "8", "--group-size", "8"),
)


WARMUP_SETTINGS = (
    *("--model", "tiny", "--trainer.weights", "full", "--adam.lr", "2e-3"),
    *("--adam.warmup-steps", "10", "--adam.schedule", "linear"),
)


def write_tasks(args: argparse.Namespace) -> str:
    """Write the words to train on as a file of tasks."""
    some = tasks("train", args.turns)[: args.words]
    file = Path(args.dir) / f"words-{args.turns}-{len(some)}.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(task) + "\n" for task in some))
    return str(file)


def start(*arguments: str) -> None:
    """Become the `whet` command with these arguments."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "whet", *arguments])


def main() -> int:
    args = parse()
    place = ["--store", args.store, "--run", RUN, "--dir", args.dir]
    match args.part:
        case "warmup":
            games = Path(args.dir) / f"games-{args.turns}-{args.games}.jsonl"
            write_games(games, turns=args.turns, games=args.games)
            start("sft", str(games), "--name", WARMUP, "--dir", args.dir, *WARMUP_SETTINGS)
        case "algo":
            tasks = ["--tasks", write_tasks(args), "--steps", str(args.steps)]
            start("train", *place, "--model", args.model, *tasks, *SETTINGS)
        case "store":
            start("store", "--port", args.store.rpartition(":")[2], "--dir", args.dir)
        case "serve":
            start("serve", *place)
        case "runner":
            start("runner", AGENT, "--concurrency", "32", *place)
        case part:  # these need torch, which the runner's environment does not have
            return importlib.import_module(part).main(args)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["warmup", "dev", "store", "serve", "runner", "algo", "endpoint"]
    parser.add_argument("part", choices=parts)
    parser.add_argument("--dir", default=".whet", help="folder of runs (default .whet)")
    parser.add_argument("--model", default=None, help="the player (default: made by `warmup`)")
    parser.add_argument("--store", default=STORE, metavar="URL", help=f"store (default {STORE})")
    parser.add_argument("--steps", type=int, default=16, help="steps of `algo` (default 16)")
    parser.add_argument(
        "--turns", type=int, default=TURNS, help=f"turns of a game (default {TURNS})"
    )
    parser.add_argument("--words", type=int, default=None, help="words to train on (default all)")
    parser.add_argument("--games", type=int, default=1600, help="games of `warmup` (default 1600)")
    parser.add_argument("--port", type=int, default=8001, help="port of `endpoint` (default 8001)")
    parser.add_argument(
        "--runner-python", default=sys.executable, metavar="FILE", help="the Python with CrewAI"
    )
    args = parser.parse_args()
    args.model = args.model or str(Path(args.dir) / "runs" / WARMUP / "model")
    return args


if __name__ == "__main__":
    sys.exit(main())
