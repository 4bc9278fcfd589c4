"""Models elsewhere under names of their own: partners and judges of an agent, never trained.

An agent asks the gateway for such a model as for any other; the call is passed on unread, as text.
Nothing of it is recorded as sampled, so nothing of it can be trained.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whet.app.relay import Relay, check_endpoint
from whet.config import GatewayConfig
from whet.errors import ConfigError, RequestError
from whet.gateway.asgi import Request
from whet.gateway.delivery import refusal
from whet.gateway.service import Log

FORM = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+)@(https?://.+)")


def relays_of(
    config: GatewayConfig, log: Log, secret: bytes, say: Callable[[str], None]
) -> dict[str, Relay]:
    """A relay for each `NAME=MODEL@URL`, once each answers; says that they are not trained.

    Raises:
        ConfigError: one is no such thing, or does not answer to its key.
    """
    relays: dict[str, Relay] = {}
    for spec in config.endpoints:
        found = FORM.fullmatch(spec)
        if found is None:
            raise ConfigError(f"gateway.endpoints are of the form NAME=MODEL@URL; found {spec!r}")
        name, model, url = found.groups()
        variable = f"WHET_{re.sub(r'[^A-Z0-9]', '_', name.upper())}_KEY"
        key = os.environ.get(variable) or os.environ.get("OPENAI_API_KEY", "")
        check_endpoint(url, key, f"{variable} or OPENAI_API_KEY")
        relays[name] = Relay(
            url, model, key, log=log, secret=secret, config=config, forces_sampling=False
        )
        say(f"note: calls to {name!r} go to {url} as text; they are never trained")
    return relays


class Elsewhere:
    """An app before the gateway's, which takes the calls that ask for a model elsewhere."""

    def __init__(self, app: ASGIApp, relays: Mapping[str, Relay]) -> None:
        self._app = app
        self._relays = relays

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            body = await request.body()
        except RequestError as error:
            await refusal(error).deliver(request, send)
            return
        relay = self._relays.get(_model(body))
        held: Iterator[Message] = iter([{"type": "http.request", "body": body}])

        async def again() -> Message:
            return next(held, None) or await receive()

        await (relay.app if relay else self._app)(scope, again, send)

    def close(self) -> None:
        """Let go of the endpoints, while the server still runs."""
        with ExitStack() as stack:
            for relay in self._relays.values():
                stack.callback(relay.close)


def _model(body: bytes) -> str:
    with suppress(ValueError):
        match json.loads(body):
            case {"model": str(model)}:
                return model
            case _:
                pass
    return ""
