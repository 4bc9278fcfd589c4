"""The call graph finds the same turn as an exhaustive search."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.gateway.graph import Graph
from whet.gateway.messages import Message, is_echo
from whet.types import AttemptId, Call, CallId, Fork, Generation, Sampling

ROOTS = ("one set of tools", "another")
USERS = (Message("user", "a"), Message("user", "b"))
TURNS = ("x", "y")
"""So few that conversations often read the same."""


def call(number: int, root: str, parent: str | None, new: Sequence[Message], says: str) -> Call:
    generation = Generation(
        tokens=(number,),
        logprobs=(-0.5,),
        versions=(0,),
        stop="stop",
        sampling=Sampling(),
        message=Message("assistant", says).to_json(),
    )
    return Call.model_validate(
        {
            "id": CallId(f"c{number}"),
            "attempt": AttemptId("a"),
            "parent": parent,
            "root": root,
            "messages": tuple(message.to_json() for message in new),
            "prompt_suffix": (0,),
            "prompt_length": 1,
            "prompt_digest": "",
            "generations": (generation,),
            "created": 0.0,
        }
    )


def deepest(graph: Graph, root: str, messages: Sequence[Message]) -> int:
    """Messages of the longest stored conversation that these continue, by looking at each."""
    known = (graph.collect_messages(call) for call in graph.calls.values() if call.root == root)
    return max(
        (len(each) for each in known if is_echo(each, messages[: len(each)])),
        default=0,
    )


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data(), reread=st.booleans())
def test_a_request_continues_the_deepest_turn_that_it_repeats(
    data: st.DataObject, reread: bool
) -> None:
    graph = Graph()
    for number in range(data.draw(st.integers(1, 8))):
        root = data.draw(st.sampled_from(ROOTS))
        conversations = [graph.collect_messages(call) for call in graph.calls.values()]
        history = data.draw(st.sampled_from([[], *conversations]))
        request = (*history, *data.draw(st.lists(st.sampled_from(USERS), min_size=1, max_size=2)))
        found = graph.find(root, request)
        depth = len(request) - len(found.rest)
        assert depth == deepest(graph, root, request)
        assert not found.lossy
        if found.turn is not None:
            assert tuple(graph.collect_messages(found.turn.call)) == request[:depth]
        parent = found.turn.id if found.turn else None
        new = call(number, root, parent, found.rest, data.draw(st.sampled_from(TURNS)))
        graph.add(new, None if reread else found.rest)


def test_of_two_turns_that_read_the_same_the_later_is_continued() -> None:
    first, second = (call(number, "r", None, USERS[:1], "x") for number in (1, 2))
    graph = Graph([first, second])
    request = (USERS[0], Message("assistant", "x"), USERS[1])
    found = graph.find("r", request)
    assert found.turn is not None
    assert found.turn.call == second


def test_a_turn_that_was_added_last_does_not_hide_a_deeper_one() -> None:
    begin = call(1, "r", None, USERS[:1], "x")
    deeper = call(2, "r", "c1.0", USERS[1:], "y")
    twin = call(3, "r", None, USERS[:1], "x")
    graph = Graph([begin, deeper, twin])
    x, y = Message("assistant", "x"), Message("assistant", "y")
    found = graph.find("r", (USERS[0], x, USERS[1], y, USERS[0]))
    assert found.turn is not None
    assert found.turn.call == deeper
    assert found.rest == USERS[:1]


@pytest.mark.parametrize(
    ("history", "fork"),
    [((), Fork.NEW_CONVERSATION), ((Message("assistant", "x"), USERS[1]), Fork.EDITED_HISTORY)],
)
def test_another_system_prompt_is_another_agent_unless_turns_come_with_it(
    history: tuple[Message, ...], fork: Fork
) -> None:
    writer, critic = (Message("system", f"You are a {role}.") for role in ("writer", "critic"))
    graph = Graph([call(1, "r", None, (writer, USERS[0]), "x")])
    request = (critic, USERS[0], *history)
    assert graph.classify_fork(graph.find("r", request), "r") is fork
