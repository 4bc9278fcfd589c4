"""A scripted OpenAI-compatible endpoint for judges."""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.io.server import AppServer

USAGE = {"prompt_tokens": 100, "completion_tokens": 20}


@dataclass
class JudgeServer:
    """Replies to each prompt with what `reply` returns: a text, or a whole response."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@contextmanager
def serve_judge(reply: Callable[[str, int], object]) -> Generator[JudgeServer]:
    """Serve `reply(prompt, number of the request)` as chat completions."""
    served = JudgeServer("")

    async def complete(request: Request) -> Response:
        body = await request.json()
        served.requests.append(body)
        found = reply(body["messages"][-1]["content"], len(served.requests))
        if isinstance(found, Response):
            return found
        choice = {"index": 0, "message": {"role": "assistant", "content": found}}
        return JSONResponse({"choices": [choice], "usage": USAGE})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    server = AppServer(app, name="judge")
    served.url = f"{server.url}/v1"
    try:
        yield served
    finally:
        server.close()


def read_answers(prompt: str) -> dict[int, str]:
    """The answers of a ranking prompt by their number."""
    found: dict[int, str] = {}
    for part in prompt.split("\n\nAnswer ")[1:]:
        number, _, rest = part.partition(":\n")
        found[int(number)] = "\n".join(rest.split("\n")[1:-1])
    return found


def rank_by(key: Callable[[str], float]) -> Callable[[str, int], str]:
    """A judge that ranks answers by a number, the largest first, with ties."""

    def reply(prompt: str, number: int) -> str:
        by_key: dict[float, list[int]] = {}
        for n, answer in read_answers(prompt).items():
            by_key.setdefault(key(answer), []).append(n)
        ranking = [by_key[k] for k in sorted(by_key, reverse=True)]
        return f"Let me think. {json.dumps({'ranking': ranking, 'reason': 'by size'})}"

    return reply
