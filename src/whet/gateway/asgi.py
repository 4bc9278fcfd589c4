"""HTTP as an ASGI server gives it: a request, its body, its client, and the way to a handler.

One pattern and one look-up find the handler, and nothing stands between the server and it: what a
framework does for every request would cost a good part of what a whole call may take.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, cast
from urllib.parse import parse_qs

from starlette.types import Message, Receive, Scope, Send

from whet.errors import RequestError, WhetError

BODY_LIMIT = 32 * 2**20
BODY_TIMEOUT_S = 30.0
"""A body that is not whole by then is refused: nobody holds a connection by sending slowly."""

PATIENCE_S = 0.02
"""An answer that takes no longer is given before anyone looks whether its client is there."""


class TooLarge(RequestError):
    """The body is larger than we read."""


class TooSlow(RequestError):
    """The body did not arrive in time."""


class ClientLeft(WhetError):
    """The client has gone: there is nobody to answer."""


class Request:
    """One HTTP request."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.params: Mapping[str, str | None] = {}
        """What the path names."""
        self._scope = scope
        self._receive = receive
        self._headers = cast(list[tuple[bytes, bytes]], scope["headers"])
        self._first = dict(reversed(self._headers))

    @property
    def query_string(self) -> str:
        """What follows the path, as it came."""
        return self._scope["query_string"].decode("latin-1")

    def header(self, name: str, default: str = "") -> str:
        """The first header of a name, which is in lower case."""
        found = self._first.get(name.encode())
        return default if found is None else found.decode("latin-1")

    def headers(self, name: str) -> Sequence[str]:
        """All headers of a name, however it is written."""
        wanted = name.lower().encode()
        if wanted not in self._first:
            return ()
        return [value.decode("latin-1") for name, value in self._headers if name == wanted]

    def query(self, name: str, default: str) -> str:
        """What the query says under a name."""
        return parse_qs(self.query_string).get(name, [default])[0]

    async def body(self) -> bytes:
        """The whole body. Raises RequestError for one that is too large, too slow or cut off."""
        length = self.header("content-length")
        if length.isdecimal() and len(length) < 20 and int(length) > BODY_LIMIT:
            raise _too_large()
        said = _said(self._receive)
        body = b"" if said is None else _part(said, BODY_LIMIT)
        if said is not None and not said.get("more_body", False):
            return body  # most bodies come with their heads
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(body)
        except TimeoutError as error:
            raise TooSlow(f"the body was not whole after {BODY_TIMEOUT_S:.0f} s") from error

    async def _read(self, beginning: bytes) -> bytes:
        parts, left = [beginning], BODY_LIMIT - len(beginning)
        more = True
        while more:
            said = await self._receive()
            parts.append(_part(said, left))
            left -= len(parts[-1])
            more = said.get("more_body", False)
        return b"".join(parts)

    # ------------------------------------------------------------- the client, once it was heard

    def watched(self, on_late: Callable[[], None] | None = None) -> "Watch":
        """Around work that ends with ClientLeft once the client has gone.

        `on_late` is told if the answer takes a while, unless the watch is closed before.
        """
        return Watch(self._receive, on_late)

    def has_left(self) -> bool:
        """Whether the client is known to have gone, without waiting for any news."""
        said = _said(self._receive)
        return said is not None and said["type"] == "http.disconnect"


class Watch:
    """Cancels the task it is entered in when the client leaves.

    Most answers are quick, and a task of its own for each watch is not cheap: it begins late.
    """

    def __init__(self, receive: Receive, on_late: Callable[[], None] | None) -> None:
        self._receive = receive
        self._on_late = on_late
        self._timer: asyncio.Handle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._over = False
        self._left = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = task.get_loop().call_later(PATIENCE_S, self._begin)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        if self._on_late is None:
            self.close()
        if self._watching is not None:
            self._watching.cancel()
        if self._left and kind is asyncio.CancelledError and self._task.uncancel() == 0:
            raise ClientLeft("the client left") from error

    def close(self) -> None:
        """Nobody is told any more that it is late."""
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        if not self._over:
            self._watching = self._task.get_loop().create_task(self._watch())
        if self._on_late is not None:
            self._on_late()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()


class _Coroutine(Protocol):
    def send(self, value: None, /) -> object: ...
    def close(self) -> None: ...


def _said(receive: Receive) -> Message | None:
    """What the client has said already, or None if one would have to wait for it."""
    news = cast(_Coroutine, receive())
    try:
        news.send(None)
    except StopIteration as told:
        return told.value
    news.close()
    return None


def _part(said: Message, limit: int) -> bytes:
    """Some of a body, of which so many bytes are still taken."""
    if said["type"] == "http.disconnect":
        raise RequestError("the client left before its request was whole")
    part: bytes = said.get("body", b"")
    if len(part) > limit:
        raise _too_large()
    return part


def _too_large() -> TooLarge:
    return TooLarge(f"the body is larger than {BODY_LIMIT // 2**20} MiB")


# --------------------------------------------------------------------------- replies and routes


class Reply(Protocol):
    """What goes back over HTTP."""

    async def deliver(self, request: Request, send: Send) -> None: ...


Handler = Callable[[Request], Awaitable[Reply]]


class Route(NamedTuple):
    """Who answers which requests."""

    method: str
    path: str
    """Names in braces are given to the handler: `{id}` is one segment, `{id:path}` all the rest."""
    handler: Handler


class Router:
    """Finds the handler of a path behind any of several beginnings."""

    def __init__(self, prefix: re.Pattern[str], routes: list[Route]) -> None:
        """The groups of `prefix` are what the beginning of a path names."""
        self._prefix = prefix
        self._fixed = {(r.method, r.path): r.handler for r in routes if "{" not in r.path}
        self._patterns = [(r.method, _pattern(r.path), r.handler) for r in routes if "{" in r.path]

    def find(self, request: Request) -> Handler | None:
        """Who answers a request, whose `params` are set, or None if nobody does."""
        begin = self._prefix.match(request.path)
        if begin is None:
            return None
        method = "GET" if request.method == "HEAD" else request.method
        path = request.path[begin.end() :]
        request.params = begin.groupdict()
        if (fixed := self._fixed.get((method, path.rstrip("/")))) is not None:
            return fixed
        for wanted, pattern, handler in self._patterns:
            if wanted == method and (found := pattern.fullmatch(path)) is not None:
                request.params = {**request.params, **found.groupdict()}
                return handler
        return None


def _pattern(path: str) -> re.Pattern[str]:
    text = re.sub(r"\{(\w+):path\}", r"(?P<\1>.*)", path)
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", text))


async def send_whole(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    """A reply in one go."""
    length = (b"content-length", b"%d" % len(body))
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [*headers, length],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})
