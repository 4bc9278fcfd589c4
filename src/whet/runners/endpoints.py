"""Endpoints at which attempts reach their model, and health checks of the gateways."""

import logging
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import anyio
from anyio import create_task_group

from whet.io.attempt_url import build_attempt_url
from whet.io.http_client import HttpClient, TransportError
from whet.protocols import Resources
from whet.types import Attempt, AttemptId, Endpoint, GatewayAddress, find_gateways

logger = logging.getLogger(__name__)

HEALTH_TTL_S = 5.0
"""Seconds for which a health check is valid, and after which a new gateway is found."""
HEALTH_TIMEOUT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


async def _return_false() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Connection:
    """The endpoint of one attempt."""

    endpoint: Endpoint
    was_lost: Callable[[], Awaitable[bool]] = _return_false
    """Whether the gateway is gone, or was restarted since the attempt began."""


class Endpoints(Protocol):
    """Source of the endpoints of attempts."""

    async def wait_ready(self) -> None:
        """Return once a gateway answers: until then nothing is worth claiming."""
        ...

    def connect(self, attempt: Attempt) -> Connection | None:
        """Return the endpoint of an attempt; None if no gateway is live any more."""
        ...


class NoEndpoint(Endpoints):
    """Empty endpoints, for agents that reach their models without whet."""

    async def wait_ready(self) -> None:
        pass

    def connect(self, attempt: Attempt) -> Connection:
        return Connection(Endpoint(base_url="", api_key="", model=""))


class RemoteEndpoints(Endpoints):
    """Endpoints at gateways that are registered in the store, or at fixed addresses.

    An attempt keeps to one gateway.
    """

    def __init__(
        self,
        resources: Resources,
        mint_key: Callable[[AttemptId], str],
        mint_reward_key: Callable[[AttemptId], str],
        *,
        addresses: Sequence[GatewayAddress] = (),
        progress: Callable[[str], None] = logger.info,
    ) -> None:
        self._resources = resources
        self._mint_key = mint_key
        self._mint_reward_key = mint_reward_key
        self._fixed = tuple(addresses)
        self._progress = progress
        self._live: dict[GatewayAddress, str] = {}
        """Gateways that answered the last health check, and the ids of their processes."""
        self._checked = -HEALTH_TTL_S
        self._checking = anyio.Lock()

    async def wait_ready(self) -> None:
        if not self._is_fresh():
            async with self._checking:
                if not self._is_fresh():
                    await self._wait_for_gateway()

    @property
    def addresses(self) -> list[GatewayAddress]:
        """Gateways that answered the last health check."""
        return sorted(self._live)

    def connect(self, attempt: Attempt) -> Connection | None:
        live = self.addresses
        if not live:
            return None
        address = live[zlib.crc32(attempt.id.encode()) % len(live)]
        endpoint = Endpoint(
            base_url=build_attempt_url(address.url, attempt),
            api_key=self._mint_key(attempt.id),
            model=address.model,
            reward_key=self._mint_reward_key(attempt.id),
        )
        return Connection(endpoint, partial(self._was_lost, address, self._live[address]))

    def _is_fresh(self) -> bool:
        return bool(self._live) and anyio.current_time() < self._checked + HEALTH_TTL_S

    async def _wait_for_gateway(self) -> None:
        pause = FIRST_PAUSE_S
        while not await self._check_all():
            if pause == FIRST_PAUSE_S:
                fixed = ", ".join(address.url for address in self._fixed)
                where = fixed or "none is registered in the store"
                self._progress(f"waiting for a gateway to answer: {where}")
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        if pause > FIRST_PAUSE_S:
            self._progress(f"gateway {', '.join(address.url for address in self._live)} answers")

    async def _check_all(self) -> bool:
        """Check every known gateway; returns whether any is live."""
        known = self._fixed or find_gateways(await self._resources.resources())
        live: dict[GatewayAddress, str] = {}

        async def check(address: GatewayAddress) -> None:
            if (instance := await fetch_instance(address.url)) is not None:
                live[address] = instance

        async with create_task_group() as tasks:
            for address in known:
                tasks.start_soon(check, address)
        self._live, self._checked = live, anyio.current_time()
        return bool(live)

    async def _was_lost(self, address: GatewayAddress, instance: str) -> bool:
        if self._live.get(address) == instance:
            if await fetch_instance(address.url) == instance:
                return False
            # The next claim checks all gateways again.
            self._live = {known: id for known, id in self._live.items() if known != address}
            self._checked = -HEALTH_TTL_S
        return True


async def fetch_instance(url: str) -> str | None:
    """Return the id of the process that answers at a gateway's address; None if there is none."""
    try:
        async with HttpClient() as http:
            reply = await http.request("GET", f"{url}/health", timeout_s=HEALTH_TIMEOUT_S)
            return reply.json()["instance"] if reply.status == 200 else None
    except (TransportError, ValueError, KeyError, TypeError):
        return None
