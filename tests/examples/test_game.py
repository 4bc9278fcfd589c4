import ast
import sys
from collections.abc import Sequence

import pytest
from commands import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "twenty_questions"))

from game import Fact, Game, LocalHelper, attribute_of, load_things, read_line, score

FOLDER = EXAMPLES / "twenty_questions"

TRAIN, TEST = load_things("train"), load_things("test")


async def said(secret: str, lines: Sequence[str]) -> Game:
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
    game = await said("owl", ["Is it alive?", "Can it fly?", "Is it soft?", "Search."])
    assert game.facts[1] == Fact("Can it fly?", "yes")
    assert game.messages[-1]["content"] == "found 1 owl. 6 left."
    helper = LocalHelper(TEST)
    await game.turn("Guess 1.", helper.answer, helper.search)
    assert game.won
    assert game.over
    assert score(game, TEST) == 1.0


@pytest.mark.anyio
async def test_a_lost_game_earns_a_little_for_what_it_ruled_out_and_nothing_for_chatter() -> None:
    nothing = await said("owl", ["What is it?"] * 10)
    some = await said("owl", ["Is it alive?"] * 10)
    more = await said("owl", ["Is it alive?", "Can it fly?", "Search.", *["Guess cow."] * 7])
    assert nothing.over
    assert score(nothing, TEST) == 0.0
    assert 0.0 < score(some, TEST) < score(more, TEST) < 1.0


@pytest.mark.anyio
async def test_a_number_that_was_not_shown_is_a_wrong_guess() -> None:
    game = await said("owl", ["Search.", "Guess 1.", "Guess 99."])
    assert [m["content"].split(".")[0] for m in game.messages[2::2]] == [
        "60 things",
        "wrong",
        "wrong",
    ]
