"""Bodies packed by gzip, in both directions."""

import zlib

from whet.store.http.problems import Malformed, TooLarge

PACKED_FROM = 1024
"""Smaller bodies are not worth packing."""
FORMAT = 31
"""What zlib calls gzip's."""


def pack(body: bytes) -> bytes:
    """The body packed, faster than small."""
    packer = zlib.compressobj(1, zlib.DEFLATED, FORMAT)
    return packer.compress(body) + packer.flush()


def unpack(packed: bytes, limit: int) -> bytes:
    """The body as it was. Unpacks no further than the limit, however much would come.

    Raises:
        TooLarge, Malformed: it is refused.
    """
    unpacker = zlib.decompressobj(FORMAT)
    try:
        body = unpacker.decompress(packed, limit)
    except zlib.error as error:
        raise Malformed(f"the body is not what gzip makes: {error}") from error
    if not unpacker.eof and len(body) == limit:
        raise too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise Malformed("the body is cut off, or something follows what gzip made")
    return body


def too_large(limit: int) -> TooLarge:
    """The refusal of a body over the limit."""
    return TooLarge(f"the body is larger than {limit} bytes")
