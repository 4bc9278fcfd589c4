"""Trace one model call and one training step through the code: files, functions, switches.

    python scripts/walk.py            # counts
    python scripts/walk.py --files    # and every file, in the order it is first entered

A *switch* is a function call into another file than the call before it, in the same thread.
Comprehensions, lambdas and what runs at import are left out, and the HTTP server around the app,
which limits the heads of requests.
"""

import argparse
import http.client
import inspect
import json
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import anyio

import whet
from whet.config import GatewayConfig
from whet.engines.fake import FakeEngine
from whet.gateway import auth
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.io.server import AppServer
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Rollout

SRC = Path(whet.__file__).parent
SKIPPED = {"<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"}
HTTP_SERVER = "_Protocol."
"""Prefix of the methods of the HTTP server in `io/server.py`, which run for any request."""
SECRET = b"0123456789abcdef"


@dataclass
class Walk:
    """The functions entered while the walk was recorded."""

    functions: dict[str, str] = field(default_factory=dict)
    """File by `file:function`, in the order of first entry."""
    switches: int = 0
    _last: dict[int, str] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """Each file once, in the order of first entry."""
        return list(dict.fromkeys(self.functions.values()))

    def enter(self, file: str, function: str) -> None:
        """Count one function call."""
        self.functions.setdefault(f"{file}:{function}", file)
        thread = threading.get_ident()
        self.switches += self._last.get(thread, file) != file
        self._last[thread] = file


class Tracer:
    """Records the functions of the package that any thread enters while it is on."""

    def __init__(self) -> None:
        self.walk: Walk | None = None

    def install(self) -> None:
        """Trace this thread and those that are started from now on."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    @contextmanager
    def record(self) -> Generator[Walk]:
        """Record what is entered inside."""
        self.walk = walk = Walk()
        yield walk
        self.walk = None

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        walk = self.walk
        if event != "call" or walk is None:
            return
        code = frame.f_code
        if code.co_name in SKIPPED or code.co_qualname.startswith(HTTP_SERVER):
            return
        if not code.co_filename.startswith(str(SRC)):
            return
        if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a class, run at import
            return
        walk.enter(str(Path(code.co_filename).relative_to(SRC)), code.co_qualname)


def walk_call(tracer: Tracer) -> Walk:
    """One Chat Completions request, from the socket to the durable record and the reply.

    It is the first of its attempt, and no other attempt has rendered its prompt. The store is that
    of a gateway process: the process that trains expires the leases.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = SQLiteStore(Path(folder) / "store.db", expires_leases=False)
        renderer = Renderer(ChatTemplate(SRC / "demos" / "tiny"))
        answer = [*renderer.template.encode("hello there"), *renderer.stop_ids[:1]]
        engine = FakeEngine([answer, answer], decode=renderer.template.decode, vocabulary=1280)
        pipeline = CallPipeline(
            engine=engine, log=store, renderer=renderer, models=("policy",), context_length=1024
        )
        server = AppServer(build_app(pipeline, SECRET, GatewayConfig()))
        try:
            ask(server.url, anyio.run(new_attempt, store, "warm-up"), "hi")
            attempt = anyio.run(new_attempt, store, "traced")
            with tracer.record() as walk:
                ask(server.url, attempt, "hello")
            assert len(anyio.run(store.calls, attempt.id)) == 1
        finally:
            server.close()
            anyio.run(store.close)
    return walk


async def new_attempt(store: SQLiteStore, name: str) -> Attempt:
    """A running attempt of a new rollout."""
    await store.enqueue([Rollout(id=name, task={}, group="g")])
    attempt = await store.claim("walk", lease_s=600, wait_s=0)
    assert attempt is not None
    return attempt


def ask(url: str, attempt: Attempt, question: str) -> None:
    """Send one request as an agent of the attempt would."""
    body = {"model": "policy", "messages": [{"role": "user", "content": question}]}
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    path = f"/rollout/{attempt.rollout.id}/attempt/{attempt.id}/v1/chat/completions"
    key = auth.mint_key(attempt.id, SECRET)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    reply = connection.getresponse()
    text = reply.read()
    assert reply.status == 200, text
    connection.close()


def walk_run(tracer: Tracer) -> tuple[Walk, list[str]]:
    """`whet.train` for one step of one group: the walk, and the files before its loop began."""
    rewards = iter((0.0, 1.0))

    def agent(task: object, llm: whet.Endpoint) -> float:
        connection = http.client.HTTPConnection(urlsplit(llm.base_url).netloc)
        body = {"model": llm.model, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
        headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
        path = urlsplit(llm.base_url).path + "/chat/completions"
        connection.request("POST", path, json.dumps(body), headers)
        connection.getresponse().read()
        connection.close()
        return next(rewards)

    train = whet.train  # imported before the walk
    with tempfile.TemporaryDirectory() as folder, tracer.record() as walk:
        train(agent, ["a"], dir=folder, steps=1, tasks_per_step=1, group_size=2, quiet=True)
    names = list(walk.functions)
    loop = names.index("training/loop.py:train")
    before = list(dict.fromkeys(walk.functions[name] for name in names[:loop]))
    return walk, before


def main() -> None:
    """Print both walks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="print every file")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    args = parser.parse_args()
    tracer = Tracer()
    tracer.install()
    call = walk_call(tracer)
    run, before = walk_run(tracer)
    walks = {
        "call": {
            "files": len(call.files),
            "functions": len(call.functions),
            "switches": call.switches,
        },
        "run": {"files": len(run.files), "functions": len(run.functions), "switches": run.switches},
    }
    if args.json:
        print(json.dumps({**walks, "files_before_the_loop": len(before)}))
        return
    for name, counts in walks.items():
        print(f"{name:5}", "  ".join(f"{key} {value}" for key, value in counts.items()))
    print(f"files before the loop: {len(before)}")
    if args.files:
        for title, files in (("call", call.files), ("before the loop", before)):
            print(f"\n{title}:", *files, sep="\n  ")


if __name__ == "__main__":
    main()
