"""Gateways, as those who look for a model find them among the resources of a run."""

from collections.abc import Iterable
from typing import NamedTuple

from whet.types.work import Resource

GATEWAY_PREFIX = "gateway-"
"""Of the names of the resources by which gateways are known: `{"url": ..., "model": ...}`."""


class GatewayAddress(NamedTuple):
    """Of a gateway, as it is known."""

    url: str
    """Without a path: `/v1` and the paths of attempts are below it."""
    model: str


def gateways_in(resources: Iterable[Resource]) -> list[GatewayAddress]:
    """Those that have told where they are, and have not left."""
    found: list[GatewayAddress] = []
    for resource in resources:
        if resource.name.startswith(GATEWAY_PREFIX):
            match resource.value:
                case {"url": str(url), "model": str(model)}:
                    found.append(GatewayAddress(url, model))
                case _:  # it has left
                    pass
    return found
