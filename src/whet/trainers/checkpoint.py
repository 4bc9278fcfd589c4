"""Folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def appear_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder under another name, then rename it: a kill leaves all of it or nothing.

    The files are on disk before the rename, so a power cut does not leave empty ones.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
