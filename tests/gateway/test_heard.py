"""What a request repeats of the one before it."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.dialects.chat import ChatDialect, read_messages
from whet.gateway.graph import Graph
from whet.gateway.heard import Heard
from whet.gateway.messages import Message

SAID: list[JsonValue] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "assistant", "content": "5", "reasoning": "easy", "index": 0},
    {"role": "assistant", "content": "5", "reasoning": "easy", "index": False},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
]


@given(requests=st.lists(st.lists(st.sampled_from(SAID), min_size=1, max_size=6), max_size=8))
def test_a_request_reads_the_same_whatever_was_heard_before(
    requests: list[list[JsonValue]],
) -> None:
    heard = Heard()
    for words in requests:
        again: list[JsonValue] = json.loads(json.dumps(words))
        assert heard.messages(again, read_messages) == tuple(read_messages(words, 0))


def test_only_what_is_new_is_read() -> None:
    heard, read = Heard(), list[tuple[int, int]]()

    def reading(words: Sequence[JsonValue], number: int) -> Sequence[Message]:
        read.append((number, len(words)))
        return read_messages(words, number)

    heard.messages(SAID[:2], reading)
    heard.messages(SAID[:5], reading)
    heard.messages(SAID[1:5], reading)
    assert read == [(0, 2), (2, 3), (0, 4)]


def test_a_fault_behind_what_was_heard_is_named_by_its_place() -> None:
    graph = Graph()

    def ask(*words: JsonValue) -> None:
        body = json.dumps({"model": "m", "messages": words}).encode()
        ChatDialect().parse(body).ask(graph)

    ask(*SAID[:2])
    with pytest.raises(RequestError, match=r"^messages\.3\.role: "):
        ask(*SAID[:2], SAID[4], {"role": "nobody"})
    with pytest.raises(RequestError, match=r"^messages\.2\.content\.0: "):
        ask(*SAID[:2], {"role": "user", "content": [{"type": "image"}]})
    with pytest.raises(RequestError, match=r"^messages\.2: input should be an object"):
        ask(*SAID[:2], "no message")
    ask(*SAID[:2], SAID[4])
