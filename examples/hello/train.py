"""Train a model to answer with the identity it is given: Mia955y, and nothing else.

    python examples/hello/train.py oneclick        # everything in this process, about a minute
    python examples/hello/train.py store           # or each part in a terminal of its own
    python examples/hello/train.py serve
    python examples/hello/train.py runner
    python examples/hello/train.py algo

The identities of training and of the comparison have no number in common. `--backend`, for
`oneclick`, or for `serve` and `algo`, chooses what trains and samples: this machine, a `whet
tinker-server` (start one with `whet tinker-server --model tiny`), or the hosted service, with its
key in TINKER_API_KEY.
"""

import argparse
import os
import sys
from pathlib import Path

import whet
from whet.demos.hello import identities, say_it

RUN = "hello"
STORE = "http://127.0.0.1:4747"
TINKER = "http://127.0.0.1:4748"
TEST_SEED = 1
SETTINGS: dict[str, dict] = {
    "tiny": {"steps": 16, "adam": {"lr": 5e-4}},
    "smollm2": {"steps": 12, "tasks_per_step": 4, "adam": {"lr": 3e-4}},
}


def trainer_settings(args: argparse.Namespace) -> dict:
    """The config keys that choose what trains."""
    if args.backend == "local":
        return {}
    trainer = {"kind": "tinker", "base_model": args.base_model}
    if args.backend == "tinker-server":
        trainer["base_url"] = args.tinker_url
    return {"trainer": trainer}


def find_key(args: argparse.Namespace) -> None:
    """Read the key that a `whet tinker-server` with the same --dir wrote."""
    key = Path(args.dir) / "tinker.key"
    if args.backend == "tinker-server" and key.exists():
        os.environ.setdefault("TINKER_API_KEY", key.read_text().strip())


def train(args: argparse.Namespace, store: str | None) -> None:
    tiny = args.model == "tiny"
    settings = SETTINGS["tiny" if tiny else "smollm2"] | trainer_settings(args)
    settings |= {"steps": args.steps} if args.steps else {}
    result = whet.train(
        say_it,
        identities("train", 512, args.seed, tiny=tiny),
        held_out=identities("test", 100, TEST_SEED, tiny=tiny),
        store=store,
        model=args.model,
        name=args.name if store is None else RUN,
        seed=args.seed,
        dir=args.dir,
        **settings,
    )
    print(f"run folder: {result.run}")


def start(*arguments: str) -> None:
    """Become the `whet` command with these arguments."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "whet", *arguments])


def main() -> None:
    args = parse()
    find_key(args)
    place = ["--store", args.store, "--run", RUN, "--dir", args.dir]
    match args.part:
        case "oneclick":
            train(args, None)
        case "algo":
            train(args, args.store)
        case "store":
            start("store", "--port", args.store.rpartition(":")[2], "--dir", args.dir)
        case "serve":
            start("serve", *place)
        case "runner":
            start("runner", f"{__file__}:say_it", *place)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["oneclick", "store", "serve", "algo", "runner"])
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a folder (default tiny)")
    parser.add_argument(
        "--backend",
        choices=["local", "tinker-server", "hosted"],
        default="local",
        help="what trains and samples (default local)",
    )
    parser.add_argument("--tinker-url", default=TINKER, help=f"tinker-server (default {TINKER})")
    parser.add_argument("--base-model", default=None, help="the model's name at the service")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training tasks")
    parser.add_argument("--dir", default=".whet", help="folder of runs (default .whet)")
    parser.add_argument("--name", default=None, help="name of the run, for oneclick")
    parser.add_argument("--store", default=STORE, metavar="URL", help=f"store (default {STORE})")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except whet.ConfigError as error:
        sys.exit(f"hello: {error}")
