"""Dialogues of the warm-up: games of a clumsy player, for a model to imitate and RL to improve.

The player knows the format and not the game: it asks at random, also twice, searches at any time,
and guesses without having found anything. No held-out word is in its games.
"""

import asyncio
import json
import random
from pathlib import Path

from game import QUESTIONS, SHOWN, Game, LocalHelper, Thing, among, load_things

SEARCH, GUESS, UNCLEAR = 0.2, 0.02, 0.05
"""Probability that a turn is a search, a wild guess, or an unclear question."""
BELIEVE = 0.85
"""Probability that a thing that was found is guessed next."""


def clumsy_line(game: Game, rng: random.Random) -> str:
    left = [n for n, noun in enumerate(game.found, start=1) if noun not in game.guesses]
    if left and rng.random() < BELIEVE:
        return f"Guess {rng.choice(left)}."
    draw = rng.random()
    if draw < SEARCH:
        return "Search."
    if draw < SEARCH + GUESS:
        return f"Guess {rng.randint(1, SHOWN)}."
    if draw < SEARCH + GUESS + UNCLEAR:
        return rng.choice(["Is it?", "What is it?", "Is it big or soft?"])
    return rng.choice(list(QUESTIONS.values()))


async def clumsy_game(things: list[Thing], turns: int, number: int, rng: random.Random) -> Game:
    """Play a whole game as the clumsy player."""
    game = Game(rng.choice(things).noun, turns)
    helper = LocalHelper(among(things, game.secret, number))
    while not game.over:
        await game.turn(clumsy_line(game, rng), helper.answer, helper.search)
    return game


def write_games(file: Path, *, turns: int, games: int) -> None:
    """Write games as dialogues, one a line, as `whet sft` reads them."""
    rng = random.Random("warm-up")
    things = load_things("train")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lines:
        for number in range(games):
            game = asyncio.run(clumsy_game(things, turns, number, rng))
            lines.write(json.dumps({"messages": game.messages}) + "\n")
