"""A run as one file: a zip of JSON lines, the same whatever database it came from.

Rows name each other by their place in the file, not by the database's own numbers, so a run that
was loaded is exported byte for byte as before.
"""

import base64
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

from whet.errors import StoreError
from whet.store.database import Column, Db
from whet.store.runs import NOWHERE, find_run, make_run

FORMAT = "whet-run-3"
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The time of every member: equal runs make equal files."""


class Table(NamedTuple):
    """A table of the archive: its columns, and which of them name rows of other tables."""

    name: str
    columns: tuple[str, ...]
    refers: dict[str, str]
    """Tables by column."""
    named: bool
    """Whether others refer to its rows."""
    where: str
    order: str

    def select(self) -> str:
        own = ["seq"] if self.named else []
        columns = ", ".join(f"{self.name}.{column}" for column in (*own, *self.columns))
        return f"SELECT {columns} FROM {self.where} ORDER BY {self.order}"

    def insert(self) -> str:
        columns = ", ".join(self.columns)
        places = ", ".join("?" for _ in self.columns)
        returning = " RETURNING seq" if self.named else ""
        return f"INSERT INTO {self.name} ({columns}) VALUES ({places}){returning}"


def _columns(names: str) -> tuple[str, ...]:
    return tuple(names.split())


OF_RUN = "{0} WHERE {0}.run = ?"
OF_ATTEMPT = "{0} JOIN attempt ON attempt.seq = {0}.attempt WHERE attempt.run = ?"

TABLES = (
    Table(
        "resource",
        ("run", "name", "version", "value", "created"),
        {"run": "run"},
        False,
        OF_RUN.format("resource"),
        "name, version",
    ),
    Table(
        "rollout",
        _columns(
            "run id body mode grp priority status attempts tries_left retry_lost lease_until"
            " failure created pruned"
        ),
        {"run": "run"},
        True,
        OF_RUN.format("rollout"),
        "seq",
    ),
    Table(
        "attempt",
        _columns("run id rollout number worker status reward failure started ended resources"),
        {"run": "run", "rollout": "rollout"},
        True,
        OF_RUN.format("attempt"),
        "seq",
    ),
    Table(
        "call",
        _columns(
            "attempt id parent root messages context prompt_length prompt_digest created origin"
        ),
        {"attempt": "attempt"},
        True,
        OF_ATTEMPT.format("call"),
        "call.seq",
    ),
    Table(
        "generation",
        ("call", "stop", "sampling", "message", "versions", "tokens", "logprobs"),
        {"call": "call"},
        False,
        "generation JOIN call ON call.seq = generation.call"
        " JOIN attempt ON attempt.seq = call.attempt WHERE attempt.run = ?",
        "generation.seq",
    ),
    Table(
        "reward",
        ("attempt", "value", "key", "target"),
        {"attempt": "attempt"},
        False,
        OF_ATTEMPT.format("reward"),
        "reward.seq",
    ),
    Table(
        "late_report",
        ("attempt", "outcome", "reported"),
        {"attempt": "attempt"},
        False,
        OF_ATTEMPT.format("late_report"),
        "late_report.seq",
    ),
    Table(
        "span",
        ("attempt", "trace", "id", "started", "body"),
        {"attempt": "attempt"},
        False,
        OF_ATTEMPT.format("span"),
        "span.seq",
    ),
    Table(
        "step",
        ("run", "step", "version", "checkpoint", "metrics"),
        {"run": "run"},
        False,
        OF_RUN.format("step"),
        "step",
    ),
    Table(
        "consumed",
        ("run", "rollout", "step", "position"),
        {"run": "run"},
        False,
        OF_RUN.format("consumed"),
        "step, position",
    ),
    Table(
        "worker",
        ("run", "name", "started", "seen", "due"),
        {"run": "run"},
        False,
        OF_RUN.format("worker"),
        "name",
    ),
)
"""In the order they must be written."""

READABLE = {FORMAT: TABLES, "whet-run-2": tuple(each for each in TABLES if each.name != "span")}
"""What the tables were when spans were not kept can be read still."""

Cell = str | int | float | None | dict[str, str]
Places = dict[str, dict[int, int]]
"""By table: the database's number of a row, and its place in the file; or the other way round."""


def export_run(db: Db, run: str, file: Path) -> None:
    """Write a run beside where it shall be, and put it there when it is whole."""
    seq = find_run(db, run)
    places: Places = {"run": {seq: 0}}
    part = file.with_name(f"{file.name}.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(_member("format"), FORMAT)
        for table in TABLES:
            with archive.open(_member(f"{table.name}.jsonl"), "w", force_zip64=True) as lines:
                for line in _rows(db, table, seq, places):
                    lines.write(line)
    part.replace(file)


def load_run(db: Db, run: str, file: Path, now: float) -> None:
    """Fill a run that has nothing."""
    if find_run(db, run) != NOWHERE:
        raise StoreError(f"run {run!r} is not empty: load into another, or drop it first")
    places: Places = {"run": {0: make_run(db, run, now)}}
    try:
        with zipfile.ZipFile(file) as archive:
            tables = READABLE.get(archive.read("format").decode())
            if tables is None:
                raise StoreError(f"{str(file)!r} is no export that this whet can read")
            for table in tables:
                _load_table(db, table, archive, places)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise StoreError(f"{str(file)!r} cannot be loaded: {error}") from error


def _rows(db: Db, table: Table, run: int, places: Places) -> Iterator[bytes]:
    mine = places.setdefault(table.name, {})
    refers = [places.get(table.refers.get(column, "")) for column in table.columns]
    for row in db.execute(table.select(), (run,)):
        if table.named:
            mine[row[0]] = len(mine)
            row = row[1:]
        cells = [
            _pack(value) if known is None else known[cast(int, value)]
            for value, known in zip(row, refers, strict=True)
        ]
        yield json.dumps(cells, separators=(",", ":")).encode() + b"\n"


def _load_table(db: Db, table: Table, archive: zipfile.ZipFile, places: Places) -> None:
    mine = places.setdefault(table.name, {})
    refers = [places.get(table.refers.get(column, "")) for column in table.columns]
    insert = table.insert()

    def values(line: bytes) -> list[Column]:
        cells: list[Cell] = json.loads(line)
        return [
            _unpack(cell) if known is None else known[cast(int, cell)]
            for cell, known in zip(cells, refers, strict=True)
        ]

    with archive.open(f"{table.name}.jsonl") as lines:
        if table.named:
            for line in lines:
                (seq,) = db.execute(insert, values(line)).fetchone()
                mine[len(mine)] = seq
        else:
            db.executemany(insert, map(values, lines))


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, LONG_AGO)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _pack(value: Column) -> Cell:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return value


def _unpack(cell: Cell) -> Column:
    return base64.b64decode(cell["base64"]) if isinstance(cell, dict) else cell
