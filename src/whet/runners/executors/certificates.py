"""Defer reading CA certificates to the first TLS connection of a client.

Every client of httpx, and so of most SDKs, parses some 140 certificates: 20 to 50 ms of CPU time,
more than all the rest of a short rollout. The gateway speaks plain HTTP, so an agent that builds a
client for each rollout pays it for nothing: see docs/decisions/0013-executing-agents.md.
"""

import ssl
import threading
from functools import cache
from pathlib import Path
from typing import Any

_lock = threading.Lock()
_WAITING = "_whet_certificates"
"""Attribute of a context: the arguments with which its certificates are to be read."""


@cache  # once in a process
def defer_certificates() -> None:
    """Make the TLS contexts of this process read files of certificates when they are first used."""
    context = ssl.SSLContext
    load = context.load_verify_locations

    def load_later(
        self: ssl.SSLContext, cafile: Any = None, capath: Any = None, cadata: Any = None
    ) -> None:
        if cafile is None or not Path(cafile).is_file():
            load(self, cafile, capath, cadata)  # what is wrong is an error at once
        else:
            with _lock:
                self.__dict__.setdefault(_WAITING, []).append((cafile, capath, cadata))

    def load_first(name: str) -> None:
        method = getattr(context, name)

        def load_and_call(self: ssl.SSLContext, *args: Any, **options: Any) -> Any:
            with _lock:
                for sources in self.__dict__.pop(_WAITING, ()):
                    load(self, *sources)
            return method(self, *args, **options)

        setattr(context, name, load_and_call)

    # asyncio wraps memory, other clients sockets; the others look at what was read.
    for name in ("wrap_bio", "wrap_socket", "cert_store_stats", "get_ca_certs"):
        load_first(name)
    context.load_verify_locations = load_later
