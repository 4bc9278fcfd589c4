"""Train a model to answer with the identity it is given: Mia955y, and nothing else.

    python examples/hello.py oneclick        # everything in this process, about a minute
    python examples/hello.py store           # or each part in a terminal of its own
    python examples/hello.py serve
    python examples/hello.py runner
    python examples/hello.py algo

The identities of training and of the comparison have no number in common. `--backend`, given to
`oneclick`, or to `serve` and `algo`, says what trains and samples: this machine, a `whet
tinker-server` (start one with `whet tinker-server --model tiny`), or the hosted service, whose key
is in TINKER_API_KEY.
"""

import argparse
import os
import sys
from pathlib import Path

from pydantic import JsonValue

import whet
from whet.app.addresses import DEFAULT_STORE, PORT
from whet.app.cli import main as whet_command
from whet.demos.hello import identities, say_it
from whet.errors import ConfigError

RUN = "hello"
TINKER = "http://127.0.0.1:4748"
TEST_SEED = 1
SETTINGS = {
    "tiny": {"steps": 16, "adam": {"lr": 5e-4}},
    "smollm2": {"steps": 12, "tasks_per_step": 4, "adam": {"lr": 3e-4}},
}


def backend(args: argparse.Namespace) -> dict[str, JsonValue]:
    """The settings that say what trains."""
    if args.backend == "local":
        return {}
    service: dict[str, JsonValue] = {"base_model": args.base_model}
    if args.backend == "tinker-server":
        service["base_url"] = args.tinker_url
    return {"trainer": {"kind": "tinker"}, "tinker": service}


def find_key(args: argparse.Namespace) -> None:
    """The key that a `whet tinker-server` with the same --dir made."""
    key = Path(args.dir) / "tinker.key"
    if args.backend == "tinker-server" and key.exists():
        os.environ.setdefault("TINKER_API_KEY", key.read_text().strip())


def train(args: argparse.Namespace, store: str | None) -> None:
    tiny = args.model == "tiny"
    settings = SETTINGS["tiny" if tiny else "smollm2"]
    settings = settings | backend(args) | ({"steps": args.steps} if args.steps else {})
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
    print(f"the run lives in {result.run}")


def main() -> int:
    args = parse()
    find_key(args)
    place = ["--store", args.store, "--run", RUN, "--dir", args.dir]
    match args.part:
        case "oneclick":
            train(args, None)
        case "algo":
            train(args, args.store)
        case "store":
            return whet_command(["store", "--port", args.store.rpartition(":")[2], *place[-2:]])
        case "serve":
            return whet_command(["serve", *place])
        case "runner":
            return whet_command(["runner", f"{__file__}:say_it", *place])
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["oneclick", "store", "serve", "algo", "runner"])
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a folder [tiny]")
    parser.add_argument(
        "--backend", choices=["local", "tinker-server", "hosted"], default="local", help="[local]"
    )
    parser.add_argument("--tinker-url", default=TINKER, help=f"of the tinker-server [{TINKER}]")
    parser.add_argument("--base-model", default=None, help="what the service calls the model")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", default=".whet", help="where runs live [.whet]")
    parser.add_argument("--name", default=None, help="of the run, for oneclick")
    parser.add_argument("--store", default=DEFAULT_STORE, metavar="URL", help=f"[port {PORT}]")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"hello: {error}")
