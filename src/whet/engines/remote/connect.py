"""Connects to running servers and builds an engine of them."""

from collections.abc import Callable, Sequence
from typing import Literal

from whet.engines.remote.engine import RemoteEngine, ServerApi, wait_until_healthy
from whet.engines.remote.replicas import Replicas
from whet.engines.remote.sglang import SGLang, probe_sglang
from whet.engines.remote.vllm import VLLM, probe_vllm
from whet.engines.request import Decode
from whet.io.http_client import HttpClient

MAX_ACTIVE = 256
"""Requests sent to a replica at once; it batches as many of them as it has memory for."""
MAX_WAITING = 4096


async def connect_servers(
    kind: Literal["vllm", "sglang"],
    urls: Sequence[str],
    decode: Decode,
    *,
    context_length: int,
    max_context: int | None = None,
    max_active: int = MAX_ACTIVE,
    max_waiting: int = MAX_WAITING,
    startup_error: Callable[[], str | None] = lambda: None,
    progress: Callable[[str], None],
) -> RemoteEngine:
    """Wait until all of these equal servers are healthy and build an engine of them.

    `context_length` is the model's own, for servers that do not report one. `startup_error` returns
    a reason once waiting is pointless.

    Raises:
        ConfigError: a server cannot be used as it is; the message says what it lacks.
    """
    http = HttpClient()
    urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
    name = VLLM.name if kind == "vllm" else SGLang.name
    server: ServerApi
    try:
        for url in urls:
            await wait_until_healthy(
                http, url, name=name, startup_error=startup_error, progress=progress
            )
        if kind == "vllm":
            server = await probe_vllm(http, urls, progress=progress)
        else:
            server = await probe_sglang(
                http, urls, context_length=context_length, progress=progress
            )
    except BaseException:
        await http.close()
        raise
    replicas = Replicas(urls, max_active=max_active, max_waiting=max_waiting)
    return RemoteEngine(server, replicas, decode, http=http, max_context=max_context)
