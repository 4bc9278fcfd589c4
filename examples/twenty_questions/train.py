"""Train a model to play 20 Questions, in the processes that take part.

    python train.py warmup                    # a model that can talk the game: about 2 minutes
    python train.py dryrun                    # four games through the whole path, no training
    python train.py store                     # then each in a terminal of its own
    python train.py serve
    python train.py runner                    # in the environment that has CrewAI
    python train.py algo

`endpoint` serves a model or a run to `evaluate.py`, which plays with words that were never trained
on, or to anything else that speaks to OpenAI.
"""

import argparse
import importlib
import sys
from pathlib import Path

from game import TURNS, tasks

from whet.app.addresses import DEFAULT_STORE
from whet.app.cli import main as whet_command
from whet.jsonlines import JsonLines

HERE = Path(__file__).parent
RUN = "twenty-questions"
SETTINGS = (
    *("--trainer.weights", "full", "--adam.lr", "3e-4", "--algorithm.credit", "turn"),
    *("--tasks-per-step", "8", "--group-size", "8"),
)


def write_tasks(args: argparse.Namespace) -> str:
    """The words to train on as a file of tasks."""
    some = tasks("train", args.turns)[: args.words]
    file = Path(args.dir) / f"words-{args.turns}-{len(some)}.jsonl"
    if not file.exists():
        JsonLines(file).append(*some)
    return str(file)


def algo(args: argparse.Namespace) -> int:
    where = ["--store", args.store, "--name", RUN, "--dir", args.dir, "--model", args.model]
    given = ["--tasks", write_tasks(args), "--steps", str(args.steps)]
    return whet_command(["train", *where, *given, *SETTINGS])


def main() -> int:
    args = parse()
    place = ["--store", args.store, "--run", RUN, "--dir", args.dir]
    match args.part:
        case "algo":
            return algo(args)
        case "store":
            return whet_command(["store", "--port", args.store.rpartition(":")[2], *place[-2:]])
        case "serve":
            return whet_command(["serve", *place])
        case "runner":
            agent = f"{HERE / 'agent.py'}:guess"
            return whet_command(["runner", agent, "--concurrency", "32", *place])
        case own:  # these need torch, which the runner's environment has not
            return importlib.import_module(own).main(args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["warmup", "dryrun", "store", "serve", "runner", "algo", "endpoint"]
    parser.add_argument("part", choices=parts)
    parser.add_argument("--dir", default=".whet", help="where runs live [.whet]")
    parser.add_argument("--model", default=None, help="that plays [what `warmup` made]")
    parser.add_argument("--store", default=DEFAULT_STORE, metavar="URL", help=f"[{DEFAULT_STORE}]")
    parser.add_argument("--steps", type=int, default=16, help="of `algo` [16]")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of a game [{TURNS}]")
    parser.add_argument("--words", type=int, default=None, help="to train on [all]")
    parser.add_argument("--games", type=int, default=1600, help="of `warmup` [1600]")
    parser.add_argument("--port", type=int, default=8001, help="of `endpoint` [8001]")
    parser.add_argument(
        "--runner-python", default=sys.executable, metavar="FILE", help="that has CrewAI"
    )
    args = parser.parse_args()
    args.model = args.model or str(Path(args.dir) / "models" / RUN)
    return args


if __name__ == "__main__":
    sys.exit(main())
