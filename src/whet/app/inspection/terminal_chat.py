"""`whet chat`: talk to a model, a run, an adapter or a checkpoint in the terminal."""

import argparse
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

from anyio import to_thread

from whet.app.cli.config_flags import add_config_flags, read_config_values
from whet.app.cli.flags import CommandParser
from whet.config import RunConfig, resolve
from whet.errors import EngineError, requires_extra
from whet.io.http_client import HttpClient
from whet.io.text import escape_lines
from whet.io.threads import run_async
from whet.types import Endpoint

SHOWN = {
    "chat": ("dir",),
    "engine": ("engine.kind", "engine.device", "engine.max_context", "engine.urls"),
}


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet chat`."""
    parser.usage = "whet chat MODEL [options]"
    group = parser.group("chat")
    group.add_argument("model", metavar="MODEL", help="a run, an adapter, a checkpoint or a model")
    group.add_argument("--policy", metavar="NAME", help="which policy, for a run with several")
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="sampling temperature (default 1)",
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer in tokens")
    add_config_flags(parser, SHOWN, only=("dir", "engine", "gateway"), file=False)
    parser.add_examples(
        "whet chat mine",
        "whet chat tiny --temperature 0 --max-tokens 64",
    )
    parser.set_defaults(run=run_chat)


def run_chat(args: argparse.Namespace) -> int:
    """Answer lines of stdin until it ends."""
    config = resolve(read_config_values(args))
    run_async(_run_chat, args, config)
    return 0


async def _run_chat(args: argparse.Namespace, config: RunConfig) -> None:
    with requires_extra("`whet chat`", "local"):
        from whet.app.composition.standalone import serve_one  # noqa: PLC0415 - imports torch
    messages = [{"role": "system", "content": args.system}] if args.system else []
    is_terminal = sys.stdin.isatty()
    async with serve_one(args.model, config, _print_note, args.policy) as served:
        if is_terminal:
            _print_note(f"{args.model} is ready: type a message, Ctrl-D ends")
        while line := await to_thread.run_sync(_read_line, is_terminal, abandon_on_cancel=True):
            messages.append({"role": "user", "content": line.strip()})
            answer = ""
            async for text in stream_answer(
                served.own_endpoint, messages, args.temperature, args.max_tokens
            ):
                sys.stdout.write(escape_lines(text) if sys.stdout.isatty() else text)
                sys.stdout.flush()
                answer += text
            sys.stdout.write("\n")
            messages.append({"role": "assistant", "content": answer})


def _read_line(is_terminal: bool) -> str:
    if is_terminal:
        sys.stderr.write("> ")
        sys.stderr.flush()
    return sys.stdin.readline()


async def stream_answer(
    endpoint: Endpoint,
    messages: list[dict[str, str]],
    temperature: float,
    max_tokens: int | None = None,
) -> AsyncGenerator[str]:
    """The text of an answer, piece by piece. Raises EngineError, also in the middle of one."""
    body = {
        "model": endpoint.model,
        "messages": messages,
        "stream": True,
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    async with (
        HttpClient(token=endpoint.api_key) as client,
        client.stream("POST", f"{endpoint.base_url}/chat/completions", json=body) as reply,
    ):
        if reply.status >= 400:
            _check(await reply.json())
        async for data in reply.content:
            line = data.decode()
            if line.startswith("data: {"):
                chunk = _check(json.loads(line.removeprefix("data: ")))
                if chunk["choices"] and (text := chunk["choices"][0]["delta"].get("content")):
                    yield text


def _check(reply: dict[str, Any]) -> dict[str, Any]:  # Any: JSON of the gateway
    """Return a reply or a chunk of one. Raises EngineError if it is an error."""
    if "error" in reply:
        raise EngineError(f"the model does not answer: {reply['error']['message']}")
    return reply


def _print_note(text: str) -> None:
    sys.stderr.write(text + "\n")
