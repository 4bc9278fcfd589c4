"""Stores: in memory, in a SQLite file, and over HTTP."""

from typing import TYPE_CHECKING

from whet.agl.store.base import (
    LightningStore,
    LightningStoreCapabilities,
    LightningStoreStatistics,
)
from whet.agl.store.client import LightningStoreClient
from whet.agl.store.memory import InMemoryLightningStore
from whet.agl.store.sqlite import SqliteLightningStore

if TYPE_CHECKING:
    from whet.agl.store.server import LightningStoreServer

__all__ = [
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreStatistics",
    "SqliteLightningStore",
]


def __getattr__(name: str) -> object:
    if name == "LightningStoreServer":  # needs the extra `gateway`, which clients do not
        from whet.agl.store.server import LightningStoreServer  # noqa: PLC0415

        return LightningStoreServer
    raise AttributeError(f"module 'whet.agl.store' has no attribute {name!r}")
