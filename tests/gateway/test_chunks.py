import json

from hypothesis import given
from hypothesis import strategies as st

from whet.gateway.dialects.chunks import Chunks


def read(event: bytes) -> object:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event.removeprefix(b"data: "))


@given(st.text(), st.text("0123456789abcdef%"), st.integers(0, 2**40))
def test_an_event_is_json_whatever_the_model_is_called(model: str, id: str, created: int) -> None:
    chunks = Chunks("chunk", id, created, model)
    common = {"id": id, "object": "chunk", "created": created, "model": model}
    assert read(chunks.event([{"index": 0}])) == common | {"choices": [{"index": 0}]}
    assert read(chunks.event([], {"usage": None})) == common | {"choices": [], "usage": None}
