"""Files that survive a kill: atomic writes of files and folders, and append-only JSON lines.

`make_memory_folder` is for files that need not survive.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from whet.errors import ConfigError

PARTIAL = ".{}.partial"
"""Name of a file or folder while it is written, by its final name."""
_PARTIAL_NAME = re.compile(re.escape(PARTIAL).replace(r"\{\}", "(.+)"))

SYNC_BYTES = 16 * 2**20
"""Bytes that are written before they are synced."""

MEMORY = Path("/dev/shm")
"""Linux's file system in memory."""


@contextmanager
def atomic_file(file: Path) -> Generator[Path]:
    """Yield a path to write to, which is renamed to the file at the end of the block.

    The rename is on disk, too, when the block has ended.
    """
    file = file.absolute()  # '.' has no name
    partial = file.with_name(PARTIAL.format(file.name))
    partial.unlink(missing_ok=True)
    yield partial
    _sync(partial)
    os.replace(partial, file)
    _sync(file.parent)


@contextmanager
def atomic_folder(folder: Path) -> Generator[Path]:
    """Yield an empty folder to fill, which replaces the folder at the end of the block.

    The files are on disk before the rename, so a power cut does not leave empty ones. Their modes
    are those of new files: some writers make files that only their owner can read.
    """
    partial = folder.with_name(PARTIAL.format(folder.name))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    mode = partial.stat().st_mode & 0o666  # what the umask allows
    for path in [*partial.rglob("*"), partial]:
        if path.is_file():
            path.chmod(mode)
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    _sync(folder.parent)


def find_final_path(path: Path) -> Path:
    """Path that a file will have when the atomic files and folders it is in are complete."""
    parts = ((_PARTIAL_NAME.fullmatch(part), part) for part in path.parts)
    return Path(*(match[1] if match else part for match, part in parts))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stat_files(folder: Path) -> list[os.stat_result]:
    """Stat all files below a folder, except those that another process deletes meanwhile."""
    found: list[os.stat_result] = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found.append(os.stat(os.path.join(parent, name)))
    return found


def write_synced(file: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write a large file, and sync it while it grows; returns its checksum.

    A sync of another file, such as a commit of the store, waits for what was queued for the disk
    before it: here for little.
    """
    with file.open("wb") as out:
        unsynced = checksum = 0
        for part in parts:
            content = memoryview(part)
            for start in range(0, len(content), SYNC_BYTES):
                chunk = content[start : start + SYNC_BYTES]
                checksum = zlib.crc32(chunk, checksum)
                unsynced += out.write(chunk)
                if unsynced >= SYNC_BYTES:
                    out.flush()
                    os.fdatasync(out.fileno())
                    unsynced = 0
    return checksum


def compute_checksum(file: Path) -> int:
    """Compute the CRC-32 of a file: gigabytes a second, where a cryptographic hash takes longer."""
    checksum = 0
    with file.open("rb") as content:
        while chunk := content.read(SYNC_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


class JsonLines:
    """A file of JSON objects, one a line. Several processes may append to it."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be opened or created."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._cut_torn_line()
        except OSError as error:
            raise ConfigError(f"cannot write to {str(path)!r}: {error.strerror}") from error

    def read(self) -> Iterator[dict[str, Any]]:
        """Read the objects. Any: their values are the writer's.

        Raises:
            ConfigError: a line is not a JSON object.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    value = json.loads(line)
                except ValueError:
                    value = None
                if not isinstance(value, dict):
                    raise ConfigError(
                        f"{str(self.path)!r} line {number} is not a JSON object: "
                        "repair or move the file"
                    )
                yield value

    def append(self, *values: Mapping[str, object]) -> None:
        """Append lines: all of them, or none if the disk is full, which raises OSError."""
        text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
        unwritten = memoryview(text.encode(errors="backslashreplace"))  # JSON's own escape
        with self._lock() as file:
            end = file.seek(0, os.SEEK_END)
            try:
                while unwritten:  # a nearly full disk takes a part
                    unwritten = unwritten[file.write(unwritten) :]
            except OSError:
                file.truncate(end)
                raise

    def _cut_torn_line(self) -> None:
        """Remove a last line without its end, which a kill or a full disk leaves."""
        with self._lock() as file:
            file.seek(0)
            written = file.readall()
            whole = written.rfind(b"\n") + 1
            if whole < len(written):
                file.truncate(whole)

    @contextmanager
    def _lock(self) -> Generator[FileIO]:
        with self.path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            yield file


def make_memory_folder(owner: Path, *, needed: int, memory: Path = MEMORY) -> Path | None:
    """A folder in memory that belongs to another folder and this process, made if it is missing.

    None if the system has none, it is another user's, or less than `needed` bytes are free.
    """
    digest = hashlib.sha256(str(owner.absolute()).encode()).hexdigest()[:16]
    folder = memory / f"whet-{os.getpid()}-{digest}"
    try:
        if shutil.disk_usage(memory).free < needed:
            return None
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return folder if is_own and not found.st_mode & 0o077 else None
