"""How many instructions a call takes, plain and streamed: what seconds on a busy machine hide.

    python bench/instructions.py [--conversations 100] [--tokens 100] [--at-once N]

The gateway of `bench/gateway.py`, in a process of its own under valgrind's callgrind, which counts
what is executed: the same work gives the same number but for a part in a thousand. One agent asks
at a time; with more, how many calls are committed together changes from run to run. What it takes
to start is counted in a run with fewer conversations, and left out. A call takes fifty times as
long under callgrind, so all that the gateway does when something is slow is put off.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from load import ask, conversation, put_load

from gateway import TURNS, Server, bodies, serve_gateway, started
from whet.gateway import asgi, conversations
from whet.store import here

WARM = 24
"""Conversations after which a call takes as much as any later one."""
NEVER_S = 1e6


def serve(folder: Path, tokens: int, at_once: int) -> None:
    here.QUICK_S = asgi.PATIENCE_S = conversations.BELIEVED_S = NEVER_S
    asyncio.run(serve_gateway(folder, tokens, 0, at_once))


def count(options: argparse.Namespace, talks: int, *, stream: bool) -> int:
    """The instructions of a gateway's whole life, with so many conversations in it."""
    with tempfile.TemporaryDirectory(prefix="whet-bench-") as name:
        folder, log = Path(name), Path(name) / "log"
        valgrind = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")
        size = ("--tokens", str(options.tokens), "--at-once", str(options.at_once))
        command = (sys.executable, __file__, "--serve-in", folder, *size)
        with started(*valgrind, f"--log-file={log}", *command) as server:
            asyncio.run(talk(server, options.conversations + WARM, talks, stream=stream))
        found = re.search(r"Collected : (\d+)", log.read_text())
        if found is None:
            raise SystemExit(f"callgrind did not say what it counted: {log.read_text()[-300:]}")
        return int(found[1])


async def talk(server: Server, attempts: int, talks: int, *, stream: bool) -> None:
    """As many attempts are made in every run, so that what they take falls on each alike."""
    (path, key), *places = json.loads(server.ask(str(1 + attempts)))
    [request, *_] = conversation(path, key, bodies("", 0, stream=False))
    reply = json.loads(await ask(server.address, request))
    answer = reply["choices"][0]["message"]["content"]
    requests = [
        conversation(path, key, bodies(answer, number, stream=stream))
        for number, (path, key) in enumerate(places[:talks])
    ]
    process = server.process.pid
    await put_load(server.address, process, requests, concurrency=1, seconds=float("inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=100, help="that are counted")
    parser.add_argument("--tokens", type=int, default=100, help="of a reply")
    parser.add_argument("--at-once", type=int, help="tokens of a stream in one piece; else all")
    parser.add_argument("--serve-in", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.at_once = options.at_once or options.tokens
    if options.serve_in:
        serve(options.serve_in, options.tokens, options.at_once)
        return
    if options.conversations < 1:
        parser.error(f"--conversations {options.conversations}: expected at least 1")
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed; Debian's package of that name has it")
    runs = [
        (stream, talks)
        for stream in (False, True)
        for talks in (WARM, options.conversations + WARM)
    ]
    os.environ["PYTHONHASHSEED"] = "0"  # sets and dictionaries are laid out alike in every run
    with ThreadPoolExecutor() as pool:
        counted = pool.map(lambda run: count(options, run[1], stream=run[0]), runs)
    few, many, few_streamed, many_streamed = counted
    calls = options.conversations * TURNS
    plain, streamed = (many - few) / calls, (many_streamed - few_streamed) / calls
    print(
        f"{calls} calls of each kind, {options.tokens} tokens a reply, {options.at_once} to a piece"
    )
    print(f"instructions of a plain call: {plain:,.0f}")
    print(f"instructions of a streamed call: {streamed:,.0f}, {streamed / plain:.4f} times")


if __name__ == "__main__":
    main()
