"""A call is freed with its last reference, without a search for cycles."""

import gc

import pytest

from support.gateway.scripted_gateway import (
    CALLING,
    CHAT_TOOL,
    CLAUDE_TOOL,
    FLAT_TOOL,
    Json,
    NewGateway,
)

pytestmark = pytest.mark.anyio

CHAT: Json = {"model": "policy", "messages": [{"role": "user", "content": "2 + 3?"}]}
ASKS: dict[str, Json] = {
    "/v1/chat/completions": CHAT | {"tools": [CHAT_TOOL]},
    "/v1/completions": {"model": "policy", "prompt": "2 + 3 ="},
    "/v1/responses": {"model": "policy", "input": "2 + 3?", "tools": [FLAT_TOOL]},
    "/v1/messages": CHAT | {"max_tokens": 99, "tools": [CLAUDE_TOOL]},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("stream", [False, True])
async def test_no_call_leaves_a_cycle(new_gateway: NewGateway, path: str, stream: bool) -> None:
    gateway = await new_gateway("five", CALLING, "five", CALLING)
    body = ASKS[path] | {"stream": stream}
    for _ in range(2):  # what is made once for all calls
        await gateway.send("POST", path, body)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(2):
            response = await gateway.send("POST", path, body)
            assert response.status_code == 200, response.text
        gc.collect()
        left = [kind for kind in map(type, gc.garbage) if str(kind.__module__).startswith("whet")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []
