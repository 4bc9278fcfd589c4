"""Versioned named values: what agents are given."""

import json
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import JsonValue

from whet.errors import NotFound
from whet.store.database import Db
from whet.store.packing import to_json
from whet.store.runs import find_run, make_run
from whet.types import Resource

VERSION = "SELECT name, version, value, created FROM resource WHERE run = ? AND name = ?"

NEWEST = """
SELECT name, version, value, created FROM resource
WHERE run = ? AND version = (
    SELECT max(version) FROM resource AS other
    WHERE other.run = resource.run AND other.name = resource.name)
ORDER BY name
"""

PUBLISH = "INSERT INTO resource (run, name, version, value, created) VALUES (?, ?, ?, ?, ?)"

MAX_VERSION = "SELECT max(version) FROM resource WHERE run = ? AND name = ?"


def publish(db: Db, run: str, name: str, value: str, now: float) -> int:
    """Add a version; `value` is JSON."""
    seq = make_run(db, run, now)
    db.execute("SELECT seq FROM run WHERE seq = ? /* LOCK */", (seq,))
    (last,) = db.execute(MAX_VERSION, (seq, name)).fetchone()
    version = (last or 0) + 1
    db.execute(PUBLISH, (seq, name, version, value, now))
    return version


def read_resource(db: Db, run: str, name: str, version: int | None) -> Resource:
    """One version, or the newest."""
    seq = find_run(db, run)
    if version is None:
        row = db.execute(f"{VERSION} ORDER BY version DESC LIMIT 1", (seq, name)).fetchone()
    else:
        row = db.execute(f"{VERSION} AND version = ?", (seq, name, version)).fetchone()
    if row is None:
        what = "no resource" if version is None else f"no version {version} of resource"
        raise NotFound(f"there is {what} {name!r}")
    return _resource(*row)


def read_resources(db: Db, run: str) -> list[Resource]:
    """The newest version of every name."""
    return [_resource(*row) for row in db.execute(NEWEST, (find_run(db, run),))]


def resolve(db: Db, run: int, wanted: Mapping[str, int | Literal["latest"]]) -> dict[str, int]:
    """Versions for what a rollout asks for. Raises NotFound."""
    resolved: dict[str, int] = {}
    for name, version in wanted.items():
        (last,) = db.execute(MAX_VERSION, (run, name)).fetchone()
        if last is None or (version != "latest" and version > last):
            raise NotFound(f"there is no version {version} of resource {name!r}")
        resolved[name] = last if version == "latest" else version
    return resolved


def check(
    db: Db, run: int, wanted: Iterable[tuple[str, Mapping[str, int | Literal["latest"]]]]
) -> None:
    """Refuse rollouts that ask for what was never published; a claim can then always resolve."""
    for rollout, resources in wanted:
        try:
            resolve(db, run, resources)
        except NotFound as error:
            raise NotFound(f"rollout {rollout!r} cannot be enqueued: {error}") from error


def pack_value(value: JsonValue) -> str:
    """As the table holds it."""
    return to_json(value)


def _resource(name: str, version: int, value: str, created: float) -> Resource:
    return Resource(name=name, version=version, value=json.loads(value), created=created)
