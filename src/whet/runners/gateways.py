"""Where attempts reach their model, and whether it is still there."""

import http.client
import json
import logging
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

import anyio
from anyio import create_task_group, to_thread

from whet.protocols import Resources
from whet.types import Attempt, AttemptId, Endpoint, GatewayAddress, gateways_in

logger = logging.getLogger(__name__)

BELIEVED_S = 5.0
"""How long a gateway that answered is not asked again, and how soon a new one is found."""

HEALTH_TIMEOUT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Connection:
    """How one attempt reaches its model."""

    endpoint: Endpoint
    was_lost: Callable[[], Awaitable[bool]]
    """Whether the gateway is gone, or was started anew since the attempt began."""


class Gateways(Protocol):
    """Who answers agents."""

    async def ready(self) -> None:
        """Return once one answers: until then nothing is worth claiming."""
        ...

    def connect(self, attempt: Attempt) -> Connection | None:
        """How an attempt reaches one; None if none was there any more."""
        ...


class OwnGateway(Gateways):
    """The gateway of this process, which lives as long as the runner."""

    def __init__(self, endpoint: Callable[[Attempt], Endpoint]) -> None:
        self._endpoint = endpoint

    async def ready(self) -> None:
        pass

    def connect(self, attempt: Attempt) -> Connection:
        return Connection(self._endpoint(attempt), _never)


class NoGateway(Gateways):
    """For agents that ask their models themselves."""

    async def ready(self) -> None:
        pass

    def connect(self, attempt: Attempt) -> Connection:
        return Connection(Endpoint(base_url="", api_key="", model=""), _never)


class RemoteGateways(Gateways):
    """Those that have told the store where they are, or the one given. An attempt keeps to one."""

    def __init__(
        self,
        resources: Resources,
        key: Callable[[AttemptId], str],
        *,
        given: GatewayAddress | None = None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self._resources = resources
        self._key = key
        self._given = given
        self._say = say
        self._live: dict[GatewayAddress, str] = {}
        """Those that answered, and which process it was."""
        self._asked = -BELIEVED_S
        self._looking = anyio.Lock()

    async def ready(self) -> None:
        if not self._is_sure():
            async with self._looking:
                if not self._is_sure():
                    await self._wait()

    def _is_sure(self) -> bool:
        return bool(self._live) and anyio.current_time() < self._asked + BELIEVED_S

    async def _wait(self) -> None:
        pause = FIRST_PAUSE_S
        while not await self._look():
            if pause == FIRST_PAUSE_S:
                where = self._given.url if self._given else "the store knows none that does"
                self._say(f"waiting for a gateway to answer: {where}")
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        if pause > FIRST_PAUSE_S:
            self._say(f"gateway {', '.join(address.url for address in self._live)} answers")

    @property
    def addresses(self) -> list[GatewayAddress]:
        """Of those that answered when they were last asked."""
        return sorted(self._live)

    def connect(self, attempt: Attempt) -> Connection | None:
        live = self.addresses
        if not live:
            return None
        address = live[zlib.crc32(attempt.id.encode()) % len(live)]
        endpoint = Endpoint(
            base_url=f"{address.url}/rollout/{attempt.rollout.id}/attempt/{attempt.id}/v1",
            api_key=self._key(attempt.id),
            model=address.model,
        )
        return Connection(endpoint, partial(self._was_lost, address, self._live[address]))

    async def _was_lost(self, address: GatewayAddress, instance: str) -> bool:
        if self._live.get(address) == instance:
            found = await to_thread.run_sync(ask_health, address.url)
            if found == instance:
                return False
            # Whoever claims next looks for all of them again.
            self._live = {known: at for known, at in self._live.items() if known != address}
            self._asked = -BELIEVED_S
        return True

    async def _look(self) -> bool:
        """Whether any answers."""
        known = [self._given] if self._given else gateways_in(await self._resources.resources())
        live: dict[GatewayAddress, str] = {}

        async def ask(address: GatewayAddress) -> None:
            if (instance := await to_thread.run_sync(ask_health, address.url)) is not None:
                live[address] = instance

        async with create_task_group() as tasks:
            for address in known:
                tasks.start_soon(ask, address)
        self._live, self._asked = live, anyio.current_time()
        return bool(live)


def ask_health(url: str) -> str | None:
    """Which process answers at a gateway's address, or None."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", f"{parts.path}/health")
        reply = connection.getresponse()
        return json.loads(reply.read())["instance"] if reply.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    finally:
        connection.close()


async def _never() -> bool:
    return False
