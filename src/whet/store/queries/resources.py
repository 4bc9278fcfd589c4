"""Resources: versioned named values that attempts use."""

import json
from collections.abc import Iterable, Mapping
from typing import Literal

from whet.errors import LeaseLost, NotFound
from whet.store.database import Db
from whet.store.queries.tables import find_run, make_run
from whet.types import TRAINER, Resource

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


def publish(
    db: Db, run: str, name: str, value: str, now: float, *, epoch: int | None = None
) -> int:
    """Insert the next version of a resource; `value` is JSON. Raises as `check_epoch`."""
    seq = make_run(db, run, now)
    check_epoch(db, run, seq, epoch)
    (last,) = db.execute(MAX_VERSION, (seq, name)).fetchone()
    version = (last or 0) + 1
    db.execute(PUBLISH, (seq, name, version, value, now))
    return version


def check_epoch(db: Db, run: str, seq: int, epoch: int | None) -> None:
    """Lock the run, and raise LeaseLost unless the epoch is that of its newest trainer."""
    db.execute("SELECT seq FROM run WHERE seq = ? /* LOCK */", (seq,))
    if epoch is None:
        return
    newest = read_resource(db, run, TRAINER, None)
    if newest.version != epoch:
        raise LeaseLost(
            f"another trainer has taken over the run {run!r} (epoch {newest.version}: "
            f"{newest.value}), and this one (epoch {epoch}) stops: train one run in "
            "one process, or choose another --run"
        )


def read_resource(db: Db, run: str, name: str, version: int | None) -> Resource:
    """Read one version, or the newest. Raises NotFound."""
    seq = find_run(db, run)
    if version is None:
        row = db.execute(f"{VERSION} ORDER BY version DESC LIMIT 1", (seq, name)).fetchone()
    else:
        row = db.execute(f"{VERSION} AND version = ?", (seq, name, version)).fetchone()
    if row is None:
        what = "no resource" if version is None else f"no version {version} of resource"
        raise NotFound(f"there is {what} {name!r}")
    return _build_resource(*row)


def read_resources(db: Db, run: str) -> list[Resource]:
    """Read the newest version of every resource."""
    return [_build_resource(*row) for row in db.execute(NEWEST, (find_run(db, run),))]


def resolve(db: Db, run: int, wanted: Mapping[str, int | Literal["latest"]]) -> dict[str, int]:
    """Resolve `latest` to version numbers. Raises NotFound."""
    resolved: dict[str, int] = {}
    for name, version in wanted.items():
        (last,) = db.execute(MAX_VERSION, (run, name)).fetchone()
        if last is None or (version != "latest" and version > last):
            raise NotFound(f"there is no version {version} of resource {name!r}")
        resolved[name] = last if version == "latest" else version
    return resolved


def check_published(
    db: Db, run: int, wanted: Iterable[tuple[str, Mapping[str, int | Literal["latest"]]]]
) -> None:
    """Refuse rollouts that want unpublished versions, so that a claim can always resolve them."""
    for rollout, resources in wanted:
        try:
            resolve(db, run, resources)
        except NotFound as error:
            raise NotFound(f"rollout {rollout!r} cannot be enqueued: {error}") from error


def _build_resource(name: str, version: int, value: str, created: float) -> Resource:
    return Resource(name=name, version=version, value=json.loads(value), created=created)
