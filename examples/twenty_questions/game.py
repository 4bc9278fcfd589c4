"""The rules of 20 Questions, and helpers that know every answer: no model, no network.

A line of the player is one of three things:

    Guess 2.          is it the second thing of the last search? Or by name: Guess owl.
    Search.           which things fit what is known by now?
    Is it alive?      anything else is a question
"""

import csv
import math
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

WORDS = Path(__file__).with_name("words.csv")
QUESTIONS = {
    "alive": "Is it alive?",
    "eat": "Can you eat it?",
    "big": "Is it big?",
    "metal": "Is it metal?",
    "wheels": "Has it wheels?",
    "water": "Is it about water?",
    "fly": "Can it fly?",
    "wear": "Do you wear it?",
    "indoors": "Is it indoors?",
    "soft": "Is it soft?",
    "legs": "Has it legs?",
    "sound": "Does it sound?",
}
"""The attributes that the local helper knows of every thing, with a question for each."""

RULES = (
    "20 Questions. Ask: alive, eat, big, metal, wheels, water, fly, wear, indoors, soft, legs,"
    " sound? Or Search. Or Guess a number that was found."
)
TURNS = 6
AMONG = 15
"""Things in a game; one of them is the secret."""
SHOWN = 9
"""Things that a search shows at most; if more fit, it returns their number."""
NARROWING, FINDING = 0.3, 0.2
"""Rewards for ruling out all things but one, and for a search that shows the rest."""


@dataclass(frozen=True)
class Thing:
    """Something to guess."""

    noun: str
    category: str
    attributes: frozenset[str]


def load_things(split: Literal["train", "test"]) -> list[Thing]:
    """The things of one split; none is in both."""
    with WORDS.open() as file:
        return [
            Thing(row["noun"], row["category"], frozenset(row["attributes"].split()))
            for row in csv.DictReader(file)
            if row["split"] == split
        ]


def tasks(split: Literal["train", "test"], turns: int) -> list[dict[str, str | int]]:
    """One for each thing of a split."""
    return [{"secret": thing.noun, "split": split, "turns": turns} for thing in load_things(split)]


def among(things: Sequence[Thing], secret: str, game: int = 0) -> list[Thing]:
    """The things of a game: the secret and others, the same whenever it is played again."""
    others = [thing for thing in things if thing.noun != secret]
    drawn = {thing.noun for thing in random.Random(f"{secret} {game}").sample(others, AMONG - 1)}
    return [thing for thing in things if thing.noun in drawn | {secret}]


@dataclass
class Fact:
    """A question and its answer."""

    question: str
    answer: str


class Helper(Protocol):
    """Answers questions and searches for things."""

    async def answer(self, question: str, secret: str) -> str:
        """`yes`, `no` or anything else for a question that cannot be answered."""
        ...

    async def search(self, facts: Sequence[Fact]) -> list[str]:
        """The nouns that fit the facts."""
        ...


class LocalHelper:
    """Answers from the word list, or `unclear`."""

    def __init__(self, things: Sequence[Thing]) -> None:
        self.things = {thing.noun: thing for thing in things}

    async def answer(self, question: str, secret: str) -> str:
        attribute = attribute_of(question)
        if attribute is None:
            return "unclear"
        return "yes" if attribute in self.things[secret].attributes else "no"

    async def search(self, facts: Sequence[Fact]) -> list[str]:
        return fitting(facts, list(self.things.values()))


def fitting(facts: Sequence[Fact], things: Sequence[Thing]) -> list[str]:
    """The nouns that no fact rules out."""
    known = {attribute_of(fact.question): fact.answer for fact in facts}
    return [
        thing.noun
        for thing in things
        if all(
            answer == ("yes" if attribute in thing.attributes else "no")
            for attribute, answer in known.items()
            if attribute is not None
        )
    ]


def attribute_of(question: str) -> str | None:
    """The one attribute a question names, if it names exactly one and asks."""
    named = [word for word in re.findall("[a-z]+", question.lower()) if word in QUESTIONS]
    return named[0] if len(named) == 1 and question.strip().endswith("?") else None


Answer = Callable[[str, str], Awaitable[str]]
Search = Callable[[list[Fact]], Awaitable[list[str]]]


@dataclass
class Game:
    """A game in progress."""

    secret: str
    turns: int
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    facts: list[Fact] = field(default_factory=list[Fact])
    found: list[str] = field(default_factory=list[str])
    """Things that the last search showed."""
    guesses: list[str] = field(default_factory=list[str])
    progress: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    """After each turn: how many facts were known, and whether any things were found."""

    def __post_init__(self) -> None:
        self.messages = self.messages or [{"role": "user", "content": self._with_turns_left(RULES)}]

    @property
    def taken(self) -> int:
        """Turns that the player has used."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def won(self) -> bool:
        return self.secret in self.guesses

    @property
    def over(self) -> bool:
        return self.won or self.taken >= self.turns

    async def turn(self, line: str, answer: Answer, search: Search) -> None:
        """Play one line of the player."""
        self.messages.append({"role": "assistant", "content": line})
        action, about = read_line(line)
        if action == "guess":
            reply = self._guess(about)
        elif action == "search":
            reply = self._show(await search(self.facts))
        else:
            reply = await answer(about, self.secret)
            if reply in ("yes", "no"):
                self.facts.append(Fact(about, reply))
        self.messages.append({"role": "user", "content": self._with_turns_left(reply)})
        self.progress.append((len(self.facts), bool(self.found)))

    def _guess(self, about: str) -> str:
        place = int(about) if about.isdecimal() else 0
        self.guesses.append(self.found[place - 1] if 0 < place <= len(self.found) else about)
        return "right" if self.won else "wrong"

    def _show(self, found: list[str]) -> str:
        self.found = found if len(found) <= SHOWN else []
        numbered = ", ".join(f"{place} {noun}" for place, noun in enumerate(self.found, start=1))
        return f"found {numbered}" if numbered else f"{len(found)} things"

    def _with_turns_left(self, text: str) -> str:
        return f"{text.rstrip('.')}. {self.turns - self.taken} left."


def read_line(line: str) -> tuple[Literal["guess", "search", "ask"], str]:
    """Parse a line of the player into an action and its object."""
    text = line.strip()
    word, _, rest = text.partition(" ")
    if word.lower().strip(".:") == "guess":
        return "guess", rest.strip(" .?!").lower()
    if text.lower().strip(".!") == "search":
        return "search", ""
    return "ask", text


def turn_rewards(game: Game, things: Sequence[Thing]) -> list[float]:
    """Rewards of the turns, besides that of winning: for things ruled out, in bits, and found.

    An unclear or repeated question, a search without result and a wild guess earn 0.
    """
    values: list[float] = []
    left, found = len(things), False
    for facts, finds in game.progress:
        now = max(1, len(fitting(game.facts[:facts], things)))
        bits = math.log2(left / now) / math.log2(len(things))
        values.append(NARROWING * bits + FINDING * (finds and not found))
        left, found = now, finds
    return values


def score(game: Game, things: Sequence[Thing]) -> float:
    """1 for a game that was won, plus the rewards of its turns."""
    return float(game.won) + sum(turn_rewards(game, things))
