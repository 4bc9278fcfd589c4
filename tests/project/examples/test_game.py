"""The game of 20 Questions: its words, its rules and the agent that plays it."""

import ast
import sys
from collections.abc import Sequence

import pytest

from support.runs.commands import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "twenty_questions"))

from game import (
    AMONG,
    FINDING,
    NARROWING,
    Fact,
    Game,
    LocalHelper,
    among,
    attribute_of,
    load_things,
    read_line,
    score,
    turn_rewards,
)

FOLDER = EXAMPLES / "twenty_questions"

TRAIN, TEST = load_things("train"), load_things("test")


async def play(secret: str, lines: Sequence[str]) -> Game:
    game, helper = Game(secret, turns=10), LocalHelper(TEST)
    for line in lines:
        await game.turn(line, helper.answer, helper.search)
    return game


@pytest.mark.parametrize("file", ["flow.py", "game.py"])
def test_the_flow_does_not_know_that_it_is_trained(file: str) -> None:
    tree = ast.parse((FOLDER / file).read_text())
    modules = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert not any(module.split(".")[0] == "whet" for module in modules)


def test_no_word_is_both_trained_and_held_out() -> None:
    assert len(TRAIN) == len(TEST) == 60
    assert len({thing.noun for thing in (*TRAIN, *TEST)}) == 120
    assert {t.category for t in TRAIN} == {t.category for t in TEST}


def test_a_game_is_about_the_same_things_whenever_it_is_played() -> None:
    first, again, other = among(TEST, "owl"), among(TEST, "owl"), among(TEST, "owl", 1)
    assert len(first) == AMONG
    assert first == again != other
    assert all("owl" in [thing.noun for thing in things] for things in (first, other))


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("Guess 2.", ("guess", "2")),
        ("guess: Owl", ("guess", "owl")),
        ("Search.", ("search", "")),
        (" Is it alive? ", ("ask", "Is it alive?")),
        ("Guessing is fun", ("ask", "Guessing is fun")),
        ("", ("ask", "")),
    ],
)
def test_a_line_is_a_guess_a_search_or_a_question(line: str, read: tuple[str, str]) -> None:
    assert read_line(line) == read


@pytest.mark.parametrize("question", ["Is it?", "Is it big or soft?", "Is it alive", ""])
def test_a_question_that_names_no_single_attribute_is_unclear(question: str) -> None:
    assert attribute_of(question) is None


@pytest.mark.anyio
async def test_a_game_is_won_by_asking_searching_and_guessing_what_was_found() -> None:
    game = await play("owl", ["Is it alive?", "Can it fly?", "Is it soft?", "Search."])
    assert game.facts[1] == Fact("Can it fly?", "yes")
    assert game.messages[-1]["content"] == "found 1 owl. 6 left."
    helper = LocalHelper(TEST)
    await game.turn("Guess 1.", helper.answer, helper.search)
    assert game.won
    assert game.over
    assert score(game, TEST) == pytest.approx(1.0 + NARROWING + FINDING)


@pytest.mark.anyio
async def test_a_turn_earns_what_it_rules_out_or_finds_and_nothing_for_chatter() -> None:
    lines = ["What is it?", "Is it alive?", "Is it alive?", "Search.", "Can it fly?", "Search."]
    game = await play("owl", [*lines, "Search.", "Guess cow.", "Guess 99.", "Is it?"])
    assert game.over
    assert not game.won
    chatter, alive, again, vain, fly, found, *rest = turn_rewards(game, TEST)
    assert chatter == again == vain == sum(rest) == 0.0
    assert 0.0 < alive < NARROWING
    assert 0.0 < fly < NARROWING
    assert found == FINDING
    assert score(game, TEST) == alive + fly + found


@pytest.mark.anyio
async def test_a_number_that_was_not_shown_is_a_wrong_guess() -> None:
    game = await play("owl", ["Search.", "Guess 1.", "Guess 99."])
    assert [m["content"].split(".")[0] for m in game.messages[2::2]] == [
        "60 things",
        "wrong",
        "wrong",
    ]
