"""Bodies of requests: whole, in time, no larger than allowed, whatever they are packed in."""

import zlib
from collections.abc import AsyncGenerator

from anyio import fail_after
from starlette.requests import ClientDisconnect, Request

from whet.store.http.problems import Malformed, TooLarge, TooSlow, WrongEncoding

BODY_LIMIT = 256 * 2**20
"""Of a body as it is meant, packed or not."""
BODY_TIMEOUT_S = 60.0
"""A body that is not whole by then is refused: nobody holds a connection by sending slowly."""
GZIP = 31
"""What zlib calls gzip's header."""


async def read_body(request: Request, *, limit: int, timeout_s: float) -> bytes:
    """The whole body, unpacked.

    Raises:
        TooLarge, TooSlow, WrongEncoding, Malformed: it is refused.
    """
    packed = await _read(request, limit=limit, timeout_s=timeout_s)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return packed
    if encoding != "gzip":
        raise WrongEncoding(f"a body may be packed by gzip, not by {encoding!r}")
    return unpack(packed, limit)


def unpack(packed: bytes, limit: int) -> bytes:
    """What gzip packed. Reads no further than the limit, however much would come."""
    unpacker = zlib.decompressobj(GZIP)
    try:
        body = unpacker.decompress(packed, limit)
    except zlib.error as error:
        raise Malformed(f"the body is not what gzip makes: {error}") from error
    if unpacker.unconsumed_tail:
        raise too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise Malformed("the body is cut off, or something follows what gzip made")
    return body


def pack(body: bytes) -> bytes:
    """The body by gzip, at the speed of a network."""
    packer = zlib.compressobj(1, zlib.DEFLATED, GZIP)
    return packer.compress(body) + packer.flush()


def too_large(limit: int) -> TooLarge:
    """The refusal of a body over the limit."""
    return TooLarge(f"the body is larger than {limit} bytes")


async def _read(request: Request, *, limit: int, timeout_s: float) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 19 or int(length) > limit):
        raise too_large(limit)
    body = bytearray()
    try:
        with fail_after(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large(limit)
    except TimeoutError as error:
        raise TooSlow(f"the body was not whole after {timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise Malformed("the client left before its request was whole") from error
    return bytes(body)


async def read_stream(request: Request, *, limit: int, pause_s: float) -> AsyncGenerator[bytes]:
    """A large body piece by piece, none of which may take longer than `pause_s`."""
    size, pieces = 0, aiter(request.stream())
    while True:
        try:
            with fail_after(pause_s):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            raise TooSlow(f"nothing of the body came for {pause_s:g} s") from error
        except ClientDisconnect as error:
            raise Malformed("the client left before its request was whole") from error
        if piece is None:
            return
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        yield piece
