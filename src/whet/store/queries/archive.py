"""Export and import of a run: a zip of JSON lines, the same for every database.

Rows refer to each other by their position in the file, not by the database's row numbers, so an
imported run is exported again byte for byte. Gateways are left out: they serve the run where it
was, and runners of the imported one would send them its tasks.
"""

import base64
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from pydantic import ValidationError

from whet.errors import StoreError
from whet.io.files import atomic_file
from whet.store.database import Column, Db
from whet.store.queries.archive_rows import build_row_model
from whet.store.queries.tables import NO_RUN, find_run, make_run
from whet.types import GATEWAY_PREFIX

FORMAT = "whet-run-5"
MEMBER_TIME = (1980, 1, 1, 0, 0, 0)
"""Time stamp of every member: equal runs make equal files."""


SOURCES = {
    "run": "{0} WHERE {0}.run = ?",
    "attempt": "{0} JOIN attempt ON attempt.seq = {0}.attempt WHERE attempt.run = ?",
    "call": "{0} JOIN call ON call.seq = {0}.call"
    " JOIN attempt ON attempt.seq = call.attempt WHERE attempt.run = ?",
}
"""How to select the rows of a run, by the first reference of a table."""


class Table(NamedTuple):
    """A table of the archive."""

    name: str
    columns: tuple[str, ...]
    references: tuple[str, ...]
    """Columns that hold row numbers, each of the table with the column's name."""
    order: str
    is_referenced: bool = False

    def select(self) -> str:
        own = ["seq"] if self.is_referenced else []
        columns = ", ".join(f"{self.name}.{column}" for column in (*own, *self.columns))
        source = SOURCES[self.references[0]].format(self.name)
        return f"SELECT {columns} FROM {source} ORDER BY {self.order}"

    def insert(self) -> str:
        columns = ", ".join(self.columns)
        marks = ", ".join("?" for _ in self.columns)
        returning = " RETURNING seq" if self.is_referenced else ""
        return f"INSERT INTO {self.name} ({columns}) VALUES ({marks}){returning}"


def _build_table(
    name: str, columns: str, references: str, order: str, *, is_referenced: bool = False
) -> Table:
    return Table(name, tuple(columns.split()), tuple(references.split()), order, is_referenced)


TABLES = (
    _build_table("resource", "run name version value created", "run", "name, version"),
    _build_table(
        "rollout",
        "run id body mode grp priority status attempts tries_left retry_lost lease_until failure"
        " created pruned",
        "run",
        "seq",
        is_referenced=True,
    ),
    _build_table(
        "attempt",
        "run id rollout number worker status reward failure started ended resources",
        "run rollout",
        "seq",
        is_referenced=True,
    ),
    _build_table(
        "call",
        "attempt id parent root messages prompt_suffix prompt_length prompt_digest created origin",
        "attempt",
        "call.seq",
        is_referenced=True,
    ),
    _build_table(
        "generation",
        "call stop sampling message versions tokens logprobs",
        "call",
        "generation.seq",
    ),
    _build_table("reward", "attempt value key target", "attempt", "reward.seq"),
    _build_table("late_report", "attempt outcome reported", "attempt", "late_report.seq"),
    _build_table("span", "attempt trace id started body", "attempt", "span.seq"),
    _build_table("step", "run step version checkpoint metrics advantages", "run", "step"),
    _build_table(
        "consumed", "run rollout step position", "run", "step, position"
    ),  # rollout: its id
    _build_table("worker", "run name started seen due", "run", "name"),
)
"""In the order of their references."""

Cell = str | int | float | None | dict[str, str]
Positions = dict[str, dict[int, int]]
"""By table: from row numbers to positions in the file, or back."""


def export_run(db: Db, run: str, file: Path) -> None:
    """Write a run to a temporary file, and rename it when it is complete."""
    seq = find_run(db, run)
    positions: Positions = {"run": {seq: 0}}
    with (
        atomic_file(file) as partial,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        archive.writestr(_build_member("format"), FORMAT)
        for table in TABLES:
            with archive.open(_build_member(f"{table.name}.jsonl"), "w", force_zip64=True) as lines:
                for line in _dump_rows(db, table, seq, positions):
                    lines.write(line)


def load_run(db: Db, run: str, file: Path, now: float) -> None:
    """Import an archive into an empty run. Raises StoreError."""
    if find_run(db, run) != NO_RUN:
        raise StoreError(f"run {run!r} is not empty: load into another, or drop it first")
    positions: Positions = {"run": {0: make_run(db, run, now)}}
    try:
        with zipfile.ZipFile(file) as archive:
            if (found := archive.read("format").decode()) != FORMAT:
                raise StoreError(
                    f"{str(file)!r} has format {found[:20]!r}, expected {FORMAT!r}: import it with"
                    " the version of whet that wrote it"
                )
            for table in TABLES:
                _load_table(db, table, archive, positions)
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise StoreError(f"{str(file)!r} cannot be loaded: {error}") from error


def _dump_rows(db: Db, table: Table, run: int, positions: Positions) -> Iterator[bytes]:
    own = positions.setdefault(table.name, {})
    references = _map_references(table, positions)
    for row in db.execute(table.select(), (run,)):
        if table.is_referenced:
            own[row[0]] = len(own)
            row = row[1:]
        if _is_gateway(table, row):
            continue
        cells = [
            _to_cell(value) if known is None else known[cast(int, value)]
            for value, known in zip(row, references, strict=True)
        ]
        yield json.dumps(cells, separators=(",", ":")).encode() + b"\n"


def _load_table(db: Db, table: Table, archive: zipfile.ZipFile, positions: Positions) -> None:
    own = positions.setdefault(table.name, {})
    references = _map_references(table, positions)
    insert, model = table.insert(), build_row_model(table.name, table.columns, table.references)

    def parse_values(line: bytes) -> list[Column]:
        cells: list[Cell] = json.loads(line)
        values = [
            _decode_cell(cell) if known is None else known[cast(int, cell)]
            for cell, known in zip(cells, references, strict=True)
        ]
        try:
            model.model_validate(dict(zip(table.columns, values, strict=True)))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise ValueError(f"{table.name}.{first['loc'][0]}: {first['msg']}") from error
        return values

    with archive.open(f"{table.name}.jsonl") as lines:
        rows = (row for row in map(parse_values, lines) if not _is_gateway(table, row))
        if table.is_referenced:
            for row in rows:
                (seq,) = db.execute(insert, row).fetchone()
                own[len(own)] = seq
        else:
            db.executemany(insert, rows)


def _is_gateway(table: Table, row: Sequence[Column]) -> bool:
    """Whether a row is a resource by which a gateway announces itself."""
    return table.name == "resource" and str(row[table.columns.index("name")]).startswith(
        GATEWAY_PREFIX
    )


def _map_references(table: Table, positions: Positions) -> list[dict[int, int] | None]:
    """The positions that each column refers to, or None."""
    return [positions[c] if c in table.references else None for c in table.columns]


def _build_member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, MEMBER_TIME)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _to_cell(value: Column) -> Cell:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return value


def _decode_cell(cell: Cell) -> Column:
    return base64.b64decode(cell["base64"]) if isinstance(cell, dict) else cell
