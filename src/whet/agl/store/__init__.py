"""Stores: in memory, in a SQLite file, and over HTTP."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whet.agl.store.base import (
        LightningStore,
        LightningStoreCapabilities,
        LightningStoreStatistics,
    )
    from whet.agl.store.client import LightningStoreClient
    from whet.agl.store.memory import InMemoryLightningStore
    from whet.agl.store.server import LightningStoreServer
    from whet.agl.store.sqlite import SqliteLightningStore

__all__ = [
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreStatistics",
    "SqliteLightningStore",
]

HOME = {
    "InMemoryLightningStore": "memory",
    "LightningStore": "base",
    "LightningStoreCapabilities": "base",
    "LightningStoreClient": "client",
    "LightningStoreServer": "server",
    "LightningStoreStatistics": "base",
    "SqliteLightningStore": "sqlite",
}


def __getattr__(name: str) -> object:
    if name not in HOME:
        raise AttributeError(f"module 'whet.agl.store' has no attribute {name!r}")
    return vars(importlib.import_module(f"whet.agl.store.{HOME[name]}"))[name]
