"""Have a model play all words of a split; results go to a file, and a killed run resumes.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...      # any; `train.py endpoint` prints its own
    python evaluate.py --model policy --output after.jsonl --against before.jsonl

Runs in the environment with CrewAI. With `--against`, the difference to another file is printed
with a paired 95 % interval over words.
"""

import argparse
import asyncio
import json
import os
import random
import sys
from pathlib import Path
from statistics import fmean

from flow import helper_for, play, player_at
from game import TURNS, among, load_things, score

RESAMPLES = 10_000
MEASURES = ("won", "reward")


async def evaluate(args: argparse.Namespace) -> None:
    """Play what is not in the file yet; each game is a line as soon as it is over."""
    things = load_things(args.split)
    done = {(line["word"], line["game"]) for line in read_lines(args.output)}
    todo = [(t, n) for n in range(args.games) for t in things if (t.noun, n) not in done]
    print(f"{len(done)} games are in {args.output}, {len(todo)} are left to play", flush=True)
    player = player_at(args.base_url, os.environ["OPENAI_API_KEY"], args.model, args.temperature)
    limit = asyncio.Semaphore(args.concurrency)

    async def one(thing, number: int) -> None:
        async with limit:
            some = among(things, thing.noun, number)
            game = await play(thing.noun, args.turns, player, helper_for(some))
        line = {
            "model": args.model,
            "word": thing.noun,
            "category": thing.category,
            "game": number,
            "turns": args.turns,
            "temperature": args.temperature,
            "won": game.won,
            "reward": score(game, some),
            "lines": [m["content"] for m in game.messages if m["role"] == "assistant"],
        }
        with args.output.open("a") as file:
            file.write(json.dumps(line) + "\n")

    async with asyncio.TaskGroup() as group:
        for thing, number in todo:
            group.create_task(one(thing, number))


def read_lines(file: Path) -> list[dict]:
    """The results in a file; a last line that a kill cut off is removed."""
    if not file.exists():
        return []
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def interval(differences: list[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of a mean."""
    rng = random.Random(0)
    means = sorted(fmean(rng.choices(differences, k=len(differences))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def by_word(file: Path, measure: str) -> dict[str, float]:
    """The mean of a measure over the games of each word."""
    games: dict[str, list[float]] = {}
    for line in read_lines(file):
        games.setdefault(line["word"], []).append(float(line[measure]))
    return {word: fmean(values) for word, values in games.items()}


def report(file: Path, against: Path | None) -> None:
    for measure in MEASURES:
        found = by_word(file, measure)
        text = f"{measure}: {fmean(found.values()):.3f} over {len(found)} words"
        if against is not None:
            base = by_word(against, measure)
            differences = [found[word] - base[word] for word in found if word in base]
            low, high = interval(differences)
            text += f"; {fmean(differences):+.3f} [{low:+.3f}, {high:+.3f}] to {against}"
        print(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    parser.add_argument(
        "--base-url", default=url, help=f"the player's API; key in OPENAI_API_KEY (default {url})"
    )
    parser.add_argument("--model", required=True, help="name of the player at the API")
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines")
    parser.add_argument(
        "--against", type=Path, default=None, help="another such file to compare with"
    )
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument("--games", type=int, default=4, help="games with each word (default 4)")
    parser.add_argument(
        "--turns", type=int, default=TURNS, help=f"turns of a game (default {TURNS})"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--concurrency", type=int, default=16)
    args = parser.parse_args()
    if "OPENAI_API_KEY" not in os.environ:
        parser.error("OPENAI_API_KEY is not set: set it to the player's key")
    return args


if __name__ == "__main__":
    arguments = parse()
    try:
        asyncio.run(evaluate(arguments))
    except KeyboardInterrupt:
        sys.exit("stopped: the same command resumes")
    report(arguments.output, arguments.against)
