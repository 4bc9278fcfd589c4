"""Read request bodies: whole, within a timeout, decompressed, and no larger than the limit."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request

from whet.store.http.errors import RefusedRequest

GZIP = 16 + zlib.MAX_WBITS
"""zlib's name for the gzip format."""


class Limits(NamedTuple):
    """Limits of a server on what it receives."""

    body: int = 256 * 2**20
    """Bytes of a body, unpacked."""
    body_s: float = 60.0
    """Seconds until a body is complete: a slow sender cannot hold a connection."""
    archive: int = 64 * 2**30
    """Bytes of an uploaded run, packed or not."""
    pause_s: float = 60.0
    """Seconds between two chunks of it."""


DEFAULT_LIMITS = Limits()


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read and unpack a whole body. Raises RefusedRequest."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise RefusedRequest(415, f"content encoding {encoding!r}: expected gzip or identity")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 19 or int(length) > limits.body):
        raise _build_too_large(limits.body)
    body = bytearray()
    with _refuse_incomplete():
        async with asyncio.timeout(limits.body_s):
            async for chunk in _stream(request, limits.body):
                body += chunk
    return _gunzip(bytes(body), limits.body) if encoding == "gzip" else bytes(body)


async def read_archive(request: Request, limits: Limits) -> AsyncGenerator[bytes]:
    """Read an archive chunk by chunk. Raises RefusedRequest."""
    chunks = _stream(request, limits.archive)
    while True:
        with _refuse_incomplete():
            async with asyncio.timeout(limits.pause_s):
                chunk = await anext(chunks, None)
        if chunk is None:
            return
        yield chunk


async def _stream(request: Request, max_bytes: int) -> AsyncGenerator[bytes]:
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _build_too_large(max_bytes)
        yield chunk


@contextmanager
def _refuse_incomplete() -> Generator[None]:
    """Raise RefusedRequest for a body that does not arrive."""
    try:
        yield
    except TimeoutError as error:
        raise RefusedRequest(408, "the body did not arrive in time") from error
    except ClientDisconnect as error:
        raise RefusedRequest(400, "the client left before the body was complete") from error


def _gunzip(packed: bytes, limit: int) -> bytes:
    """Unpack no further than the limit, however much would come."""
    unpacker = zlib.decompressobj(GZIP)
    try:
        body = unpacker.decompress(packed, limit)
    except zlib.error as error:
        raise RefusedRequest(400, f"the body is not gzip: {error}") from error
    if not unpacker.eof and len(body) == limit:
        raise _build_too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise RefusedRequest(400, "the gzip body is truncated, or more follows it")
    return body


def _build_too_large(limit: int) -> RefusedRequest:
    return RefusedRequest(413, f"the body is larger than {limit} bytes")
