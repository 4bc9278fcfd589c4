"""A model that never saw the game imitates a clumsy player first: RL needs something to improve.

The player knows how to talk and not how to play: it asks whatever comes to mind, also twice,
searches at any time, and guesses without having found anything. No held-out word is in its games.
"""

import argparse
import asyncio
import random
from pathlib import Path
from statistics import fmean

from game import QUESTIONS, SHOWN, Game, LocalHelper, Thing, among, load_things

from whet.config import AdamConfig, LossConfig, TrainerConfig
from whet.gateway.messages import Message
from whet.gateway.template import ChatTemplate
from whet.policies.catalogue import resolve_model
from whet.policies.local import LocalPolicy
from whet.rows import normalise
from whet.trainers.local import LocalTrainer
from whet.types import GenerationId, Row, SampledSpan

SEARCH, GUESS, UNCLEAR = 0.2, 0.02, 0.05
"""How often a turn is a search, a wild guess, or nothing anyone understands."""
BELIEVE = 0.85
"""How often a thing that was found is guessed next."""


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
    """A whole game of the clumsy player."""
    game = Game(rng.choice(things).noun, turns)
    helper = LocalHelper(among(things, game.secret, number))
    while not game.over:
        await game.turn(clumsy_line(game, rng), helper.answer, helper.search)
    return game


def row(template: ChatTemplate, game: Game, number: int) -> Row:
    """A game as a row to imitate: every line of the player counts, the rest is context."""
    messages = [Message(m["role"], m["content"]) for m in game.messages]
    first, opened = (
        template.render(messages[:1], [], add_generation_prompt=open) for open in (False, True)
    )
    opening = opened.removeprefix(first)
    text = template.render(messages, [], add_generation_prompt=False)
    tokens: list[int] = []
    spans: list[SampledSpan] = []
    done = 0
    for message in messages:
        if message.role == "assistant":
            start = text.index(opening, done) + len(opening)
            end = text.index("\n", start)  # after the mark that ends a turn, which is sampled
            tokens += template.encode(text[done:start])
            sampled = template.encode(text[start:end])
            spans.append(imitated(f"{number}.{len(spans)}", len(tokens), len(sampled)))
            tokens += sampled
            done = end
    return Row(tuple(tokens), tuple(spans), rollout=f"g{number}", group=f"g{number}")


def imitated(name: str, start: int, count: int) -> SampledSpan:
    return SampledSpan(
        generation=GenerationId(name),
        start=start,
        logprobs=(0.0,) * count,
        versions=(0,) * count,
        advantages=(1.0,) * count,
        weight=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )


async def warm_up(model: Path, into: Path, *, turns: int, games: int) -> None:
    """Write what the model becomes after imitating so many games, each of them once."""
    rng = random.Random("warm-up")
    template = ChatTemplate(model)
    things = load_things("train")
    rows: list[Row] = []
    for number in range(games):
        rows.append(row(template, await clumsy_game(things, turns, number, rng), number))
    policy = LocalPolicy(model, TrainerConfig(weights="full"), device="auto", seed=0)
    trainer = LocalTrainer(policy)
    batch, losses = 16, list[float]()
    updates = games // batch
    adam = AdamConfig(lr=2e-3, schedule="linear", warmup_steps=10)
    for step in range(updates):
        some = normalise(rows[step * batch : (step + 1) * batch], LossConfig())
        metrics = await trainer.forward_backward(some, LossConfig(name="cross_entropy"))
        await trainer.optim_step(adam.at(step, updates))
        losses.append(metrics["loss"])
        if step % 20 == 19:
            print(f"warm-up {step + 1}/{updates}: loss {fmean(losses[-20:]):.3f}", flush=True)
    await trainer.export(into)


def main(args: argparse.Namespace) -> int:
    start = resolve_model("tiny", progress=print)
    asyncio.run(warm_up(start, Path(args.model), turns=args.turns, games=args.games))
    print(f"written to {args.model}")
    return 0
