"""`LightningStoreClient`: a store at the address of a server."""

import asyncio
import inspect
import time
from collections.abc import Sequence
from typing import Any

from whet.agl.store.base import LightningStore, LightningStoreCapabilities
from whet.agl.store.rpc import HEALTH, METHODS, PREFIX
from whet.agl.types import Rollout
from whet.errors import ConfigError, StoreError
from whet.io.http_client import ConnectError, HttpClient, Response, TransportError
from whet.store.http.token import find_token

_SIGNATURES = {name: inspect.signature(getattr(LightningStore, name)) for name in METHODS}


class LightningStoreClient(LightningStore):
    """The methods of a store, over HTTP; usable from several event loops.

    A request that was never sent is sent again; one that may have arrived is not, so that nothing
    is enqueued twice.
    """

    def __init__(
        self,
        server_address: str,
        *,
        token: str | None = None,
        retry_delays: Sequence[float] = (1.0, 2.0, 5.0),
        health_retry_delays: Sequence[float] = (0.1, 0.2, 0.5),
        request_timeout: float = 30.0,
        connection_timeout: float = 5.0,
    ) -> None:
        """Without a `token` it is WHET_STORE_TOKEN, or that in `.whet/store.token`.

        Raises:
            ConfigError: there is no token.
        """
        self.server_address = server_address.rstrip("/")
        self._http = HttpClient(token=token or find_token(), connect_s=connection_timeout)
        self._delays = (*retry_delays,)
        self._timeout = request_timeout

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return LightningStoreCapabilities(
            thread_safe=True, async_safe=True, zero_copy=True, otlp_traces=False
        )

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.close()

    async def health(self) -> bool:
        """Return whether the server answers."""
        try:
            response = await self._http.request(
                "GET", self.server_address + HEALTH, timeout_s=self._timeout
            )
        except TransportError:
            return False
        return response.status == 200

    async def wait_for_rollouts(
        self, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[Rollout]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            turn = self._timeout / 2  # the server must reply before the request times out
            found = await self._call(
                "wait_for_rollouts",
                {
                    "rollout_ids": list(rollout_ids),
                    "timeout": turn if left is None else min(left, turn),
                },
            )
            if left == 0.0 or len(found) == len(rollout_ids):
                return found
            known = await self.query_rollouts(rollout_id_in=list(rollout_ids))
            if len({each.rollout_id for each in found}) == len(known):
                return found

    async def _call(self, name: str, arguments: dict[str, object]) -> Any:
        """Call a method of the store. Any: the result has the method's own type.

        Raises:
            ValueError: the store refused the arguments.
            ConfigError: the token is wrong.
            StoreError: the server cannot be reached, or failed.
        """
        method = METHODS[name]
        response = await self._post(PREFIX + name, method.dump_arguments(arguments))
        if response.status == 200:
            return method.load_result(arguments, response.body)
        message = _read_error(response)
        kind = {400: ValueError, 401: ConfigError}.get(response.status, StoreError)
        raise kind(message)

    async def _post(self, path: str, body: bytes) -> Response:
        for delay in (*self._delays, None):
            try:
                return await self._http.request(
                    "POST", self.server_address + path, body=body, timeout_s=self._timeout
                )
            except ConnectError as error:
                if delay is None:
                    raise StoreError(
                        f"no store at {self.server_address}: {error}; start one with `agl store`"
                    ) from error
                await asyncio.sleep(delay)
            except TransportError as error:
                raise StoreError(f"the store at {self.server_address} failed: {error}") from error
        raise AssertionError


def _read_error(response: Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"the store answered with status {response.status}"


def _make_method(name: str) -> Any:
    signature = _SIGNATURES[name]

    async def call(self: LightningStoreClient, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs).arguments
        arguments = {key: value for key, value in bound.items() if key != "self"}
        return await self._call(name, arguments)  # pyright: ignore[reportPrivateUsage]  # its own method

    call.__name__ = name
    call.__doc__ = getattr(LightningStore, name).__doc__
    return call


for _name in METHODS:
    if _name not in vars(LightningStoreClient):
        setattr(LightningStoreClient, _name, _make_method(_name))
