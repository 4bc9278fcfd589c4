"""Have a model play all words of a split; results append to a file, and a killed run goes on.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...      # any; `train.py endpoint` prints its own
    python evaluate.py --model policy --output after.jsonl --against before.jsonl

Runs in the environment that has CrewAI. With `--against`, the difference to another file is told
with a paired 95 % interval over words.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from statistics import fmean

from flow import helper_for, play, player_at
from game import TURNS, among, load_things, score

from whet.app.scores import gain
from whet.jsonlines import JsonLines

RESAMPLES = 10_000
MEASURES = ("won", "reward")


async def evaluate(args: argparse.Namespace) -> None:
    """Play what is not in the file yet; each game is a line as soon as it is over."""
    things = load_things(args.split)
    lines = JsonLines(args.output)
    done = {(line["word"], line["game"]) for line in lines.read()}
    todo = [(t, n) for n in range(args.games) for t in things if (t.noun, n) not in done]
    print(f"{len(done)} games are in {args.output}, {len(todo)} are to be played", flush=True)
    player = player_at(args.base_url, os.environ["OPENAI_API_KEY"], args.model, args.temperature)
    at_once = asyncio.Semaphore(args.concurrency)

    async def one(thing, number: int) -> None:
        async with at_once:
            some = among(things, thing.noun, number)
            game = await play(thing.noun, args.turns, player, helper_for(some))
        lines.append(
            {
                "model": args.model,
                "word": thing.noun,
                "category": thing.category,
                "game": number,
                "turns": args.turns,
                "temperature": args.temperature,
                "won": game.won,
                "reward": score(game, some),
                "said": [m["content"] for m in game.messages if m["role"] == "assistant"],
            }
        )

    async with asyncio.TaskGroup() as group:
        for thing, number in todo:
            group.create_task(one(thing, number))


def by_word(file: Path, measure: str) -> dict[str, float]:
    """The mean of a measure over the games of each word."""
    games: dict[str, list[float]] = {}
    for line in JsonLines(file).read():
        games.setdefault(line["word"], []).append(float(line[measure]))
    return {word: fmean(values) for word, values in games.items()}


def report(file: Path, against: Path | None) -> None:
    for measure in MEASURES:
        found = by_word(file, measure)
        text = f"{measure}: {fmean(found.values()):.3f} over {len(found)} words"
        if against is not None:
            base = by_word(against, measure)
            both = [word for word in found if word in base]
            estimate = gain(
                [base[word] for word in both], [found[word] for word in both], resamples=RESAMPLES
            )
            low, high = estimate.ci95
            text += f"; {estimate.mean:+.3f} [{low:+.3f}, {high:+.3f}] to {against}"
        print(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    parser.add_argument(
        "--base-url", default=url, help=f"of the player; key: OPENAI_API_KEY [{url}]"
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines")
    parser.add_argument("--against", type=Path, default=None, help="another such file")
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument("--games", type=int, default=4, help="with each word [4]")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of a game [{TURNS}]")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--concurrency", type=int, default=16)
    args = parser.parse_args()
    if "OPENAI_API_KEY" not in os.environ:
        parser.error("OPENAI_API_KEY is not set: the player's key is read from there")
    return args


if __name__ == "__main__":
    arguments = parse()
    try:
        asyncio.run(evaluate(arguments))
    except KeyboardInterrupt:
        sys.exit("stopped: the same command goes on")
    report(arguments.output, arguments.against)
