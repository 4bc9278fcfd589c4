"""Files and folders that appear whole or not at all, whenever the process is killed."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".{}.partial"
"""What is not whole yet, by the name it will have."""


@contextmanager
def whole_file(file: Path) -> Generator[Path]:
    """A place to write a file to, which takes its name at the end."""
    partial = file.with_name(PARTIAL.format(file.name))
    partial.unlink(missing_ok=True)
    yield partial
    _sync(partial)
    os.replace(partial, file)


@contextmanager
def whole_folder(folder: Path) -> Generator[Path]:
    """An empty folder to fill, which takes the place of another at the end.

    The files are on disk before the rename, so a power cut does not leave empty ones.
    """
    partial = folder.with_name(PARTIAL.format(folder.name))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
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
