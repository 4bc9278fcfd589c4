"""Bodies of requests: whole, in time, no larger than allowed, whatever they are packed in."""

from collections.abc import AsyncGenerator
from typing import NamedTuple

from anyio import fail_after
from starlette.requests import ClientDisconnect, Request

from whet.store.http import gzipped
from whet.store.http.problems import Malformed, TooSlow, WrongEncoding


class Limits(NamedTuple):
    """What a server takes."""

    body: int = 256 * 2**20
    """Bytes of a body as it is meant, packed or not."""
    body_s: float = 60.0
    """A body that is not whole by then is refused: nobody holds a connection by sending slowly."""
    archive: int = 64 * 2**30
    """Bytes of a run that is loaded, packed or not."""
    pause_s: float = 60.0
    """Between two pieces of it."""


DEFAULT_LIMITS = Limits()


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, unpacked.

    Raises:
        TooLarge, TooSlow, WrongEncoding, Malformed: it is refused.
    """
    packed = await _read(request, limits)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return packed
    if encoding != "gzip":
        raise WrongEncoding(f"a body may be packed by gzip, not by {encoding!r}")
    return gzipped.unpack(packed, limits.body)


async def _read(request: Request, limits: Limits) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 19 or int(length) > limits.body):
        raise gzipped.too_large(limits.body)
    body = bytearray()
    try:
        with fail_after(limits.body_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body:
                    raise gzipped.too_large(limits.body)
    except TimeoutError as error:
        raise TooSlow(f"the body was not whole after {limits.body_s:g} s") from error
    except ClientDisconnect as error:
        raise Malformed("the client left before its request was whole") from error
    return bytes(body)


async def read_pieces(request: Request, limits: Limits) -> AsyncGenerator[bytes]:
    """A large body piece by piece.

    Raises:
        TooLarge, TooSlow, Malformed: it is refused.
    """
    size, pieces = 0, aiter(request.stream())
    while True:
        try:
            with fail_after(limits.pause_s):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            raise TooSlow(f"nothing of the body came for {limits.pause_s:g} s") from error
        except ClientDisconnect as error:
            raise Malformed("the client left before its request was whole") from error
        if piece is None:
            return
        size += len(piece)
        if size > limits.archive:
            raise gzipped.too_large(limits.archive)
        yield piece
