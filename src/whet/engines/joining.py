"""Makes an engine of servers that run."""

from collections.abc import Callable, Sequence
from typing import Literal

from whet.engines.replicas import Replicas
from whet.engines.served import Http, ServedEngine, Server, wait_until_well
from whet.engines.sglang import SGLang, find_sglang
from whet.engines.vllm import VLLM, find_vllm

AT_ONCE = 256
"""Requests given to a replica; it batches as many of them as it has memory for."""
MOST_WAITING = 4096


async def join_servers(
    kind: Literal["vllm", "sglang"],
    urls: Sequence[str],
    decode: Callable[[Sequence[int]], str],
    *,
    context_length: int,
    max_context: int | None = None,
    at_once: int = AT_ONCE,
    most_waiting: int = MOST_WAITING,
    alive: Callable[[], str | None] = lambda: None,
    say: Callable[[str], None],
) -> ServedEngine:
    """An engine of equal servers, once all of them answer.

    `context_length` is the model's own, for servers that do not tell it. `alive` gives a reason
    once there is nothing left to wait for.

    Raises:
        ConfigError: one cannot be used as it is; the message says what it lacks.
    """
    http = Http()
    urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
    server: Server = VLLM(model="", context_length=0)
    if kind == "sglang":
        server = SGLang(context_length=0)
    try:
        for url in urls:
            await wait_until_well(server, http, url, alive=alive, say=say)
        if kind == "vllm":
            server = await find_vllm(http, urls, say=say)
        else:
            server = await find_sglang(http, urls, context_length=context_length, say=say)
    except BaseException:
        await http.close()
        raise
    replicas = Replicas(urls, at_once=at_once, most_waiting=most_waiting)
    return ServedEngine(server, replicas, decode, http=http, max_context=max_context)
