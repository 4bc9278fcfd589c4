"""The runs that a dashboard shows, and their stores."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple, Protocol

from anyio import to_thread

from whet.app.composition.distributed import DATABASE
from whet.app.inspection.run_list import RunSummary, list_runs
from whet.app.run_folder import RunFolder
from whet.config import RunConfig
from whet.errors import ConfigError, NotFound, StoreError
from whet.store import DEFAULT_RUN, open_database
from whet.store.queries import browse
from whet.store.sql_store import SQLStore

MAX_OPEN = 8
"""Stores that stay open."""


class OpenedRun(NamedTuple):
    """A run whose records can be read."""

    name: str
    store: SQLStore
    folder: RunFolder | None
    """None if only a store knows it."""


def read_config(run: OpenedRun) -> RunConfig:
    """Return the config of a run; the default one where it is not on this machine."""
    try:
        return run.folder.read_config() if run.folder else RunConfig(model="")
    except ConfigError:
        return RunConfig(model="")


class Catalog(Protocol):
    """The runs of a folder or of a store."""

    async def list_summaries(self) -> list[RunSummary]:
        """List the runs, the newest first."""
        ...

    async def open(self, name: str) -> OpenedRun:
        """Open a run by its name. Raises NotFound."""
        ...

    async def close(self) -> None:
        """Close what was opened."""
        ...


class FolderCatalog(Catalog):
    """The runs of a directory, each with a store of its own or in the directory's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stores: OrderedDict[Path, SQLStore] = OrderedDict()

    async def list_summaries(self) -> list[RunSummary]:
        return await to_thread.run_sync(list_runs, self._directory)

    async def open(self, name: str) -> OpenedRun:
        folder = find_folder(self._directory, name)
        if folder is None:
            raise NotFound(f"there is no run {name!r} in {str(self._directory)!r}")
        if folder.store.exists():
            return OpenedRun(name, await self._open_store(folder.store), folder)
        shared = self._directory / DATABASE
        if shared.exists():
            return OpenedRun(name, (await self._open_store(shared)).for_run(name), folder)
        raise NotFound(f"the run {name!r} has no records in {str(self._directory)!r}")

    async def close(self) -> None:
        for store in self._stores.values():
            await store.close()
        self._stores.clear()

    async def _open_store(self, path: Path) -> SQLStore:
        if path not in self._stores:
            self._stores[path] = open_database(path, run=DEFAULT_RUN)
            if len(self._stores) > MAX_OPEN:
                _, oldest = self._stores.popitem(last=False)
                await oldest.close()
        self._stores.move_to_end(path)
        return self._stores[path]


class StoreCatalog(Catalog):
    """The runs of one database, with their folders where the directory has them."""

    def __init__(self, store: SQLStore, directory: Path) -> None:
        """The caller closes the store."""
        self._store = store
        self._directory = directory

    async def list_summaries(self) -> list[RunSummary]:
        folders = {run.name: run for run in await to_thread.run_sync(list_runs, self._directory)}
        found: list[RunSummary] = []
        for name in await self._store.browse(browse.read_run_names):
            run = folders.get(name) or await _summarize_records(self._store.for_run(name))
            found.append(run)
        return sorted(found, key=lambda run: -run.changed)

    async def open(self, name: str) -> OpenedRun:
        try:
            store = self._store.for_run(name)
        except StoreError as error:
            raise NotFound(f"there is no run {name!r}") from error
        return OpenedRun(name, store, find_folder(self._directory, name))

    async def close(self) -> None:
        pass


def find_folder(directory: Path, name: str) -> RunFolder | None:
    """Return the folder of a run by its name, which is never a path."""
    if not name or name != Path(name).name:
        return None
    path = directory / "runs" / name
    # Not Path.is_file, which raises where a name is too long.
    return RunFolder(path) if os.path.isfile(path / "config.json") else None


async def _summarize_records(store: SQLStore) -> RunSummary:
    """Summarize a run that has no folder on this machine."""
    steps = await store.browse(browse.read_step_rows, -1)
    workers = await store.workers()
    return RunSummary(
        name=store.run,
        kind="",
        model="",
        state="stopped",
        steps=len(steps),
        reward=steps[-1].metrics.get("reward") if steps else None,
        gain=None,
        rewards=tuple(step.metrics.get("reward") for step in steps),
        changed=max((worker.seen for worker in workers), default=0.0),
        bytes=0,
    )
