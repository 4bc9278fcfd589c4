"""A run's folder: where everything of a run lives, owned by one process at a time."""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from pydantic import JsonValue, ValidationError

from whet.config import RunConfig, explain, merge, resolve
from whet.durable import whole_file
from whet.errors import ConfigError

MAY_CHANGE = frozenset(
    {
        "algorithm.logged_keys",
        "algorithm.reward_keys",
        "engine.command",
        "engine.device",
        "engine.flags",
        "engine.kind",
        "engine.kv_tokens",
        "engine.max_active",
        "engine.max_waiting",
        "engine.urls",
        "gateway.host",
        "gateway.port",
        "runner.concurrency",
        "runner.lease_s",
        "runner.processes",
        "runner.tracer",
        "tracking.mlflow_uri",
        "tracking.names",
        "tracking.project",
        "tracking.wandb_mode",
        "trainer.micro_batch_tokens",
    }
)
"""Keys of where and how fast a run works, not of what it learns: a resumed run takes new ones."""


class RunFolder:
    """`<dir>/runs/<name>/`: config, store, checkpoints, the trained model, the report."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.store = path / "store.db"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        """What engines in other processes load."""
        self.model = path / "model"
        self.picture = path / "curve.png"
        self.report = path / "report.json"
        self._kind = path / "kind"
        self._secret = path / "gateway.key"
        self._tasks = path / "tasks.json"

    @classmethod
    def create(cls, config: RunConfig, kind: str) -> "RunFolder":
        """A new run's folder with its resolved config. Raises ConfigError if it cannot be made."""
        name = config.name or f"{kind}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        folder = cls(config.dir / "runs" / name)
        with _writing(folder.path):
            if folder.config_file.exists():
                raise ConfigError(
                    f"the run {name!r} exists already: continue it with --resume {name}, or "
                    "choose another --name"
                )
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            _write_whole(folder._kind, kind.encode())
            _write_whole(folder._secret, secrets.token_bytes(32), mode=0o600)
            # Last: a folder with a config is a run.
            _write_whole(folder.config_file, config.model_dump_json(indent=2).encode())
        return folder

    @classmethod
    def latest(cls, directory: Path, kind: str) -> "RunFolder":
        """The newest run of a kind. Raises ConfigError if there is none."""
        runs = sorted((directory / "runs").glob("*/config.json"), key=lambda p: p.stat().st_mtime)
        for file in reversed(runs):
            folder = cls(file.parent)
            if folder._kind.is_file() and folder._kind.read_text() == kind:
                return folder
        raise ConfigError(
            f"there is no run to resume in {str(directory / 'runs')!r}: start one without --resume"
        )

    def config(self) -> RunConfig:
        """The config the run was started with. Raises ConfigError if this is not a run."""
        try:
            return RunConfig.model_validate_json(self.config_file.read_text())
        except OSError as error:
            raise ConfigError(f"{str(self.path)!r} is not a run: it has no config.json") from error
        except ValidationError as error:
            raise ConfigError(f"{str(self.config_file)!r}: {explain(error)}") from error

    def resume(self, values: Mapping[str, JsonValue]) -> None:
        """Prepare to continue: take over what may change, and refuse what may not.

        Raises:
            ConfigError: this is not a run, or a value differs from what it was started with.
        """
        kept = self.config()
        asked = {key: value for key, value in values.items() if key not in ("dir", "name")}
        new = resolve(merge(kept.model_dump(mode="json"), asked))
        before = dict(_leaves(kept.model_dump(mode="json")))
        for key, value in _leaves(new.model_dump(mode="json")):
            if value != before[key] and key not in MAY_CHANGE:
                raise ConfigError(
                    f"a resumed run keeps its config: {key!r} is {before[key]!r} there, found "
                    f"{value!r}; leave it out, or start a new run"
                )
        if new != kept:
            with _writing(self.path):
                _write_whole(self.config_file, new.model_dump_json(indent=2).encode())

    def keep_tasks(self, tasks: Sequence[JsonValue], held_out: Sequence[JsonValue]) -> None:
        """Remember what the run is about. Raises ConfigError if it was about other tasks before.

        Rollouts are known by id: with other tasks behind them, a resumed run would mix scores of
        two datasets, and evaluate the trained model as the base.
        """
        found = {"tasks": _digest(tasks), "held-out tasks": _digest(held_out)}
        try:
            kept = json.loads(self._tasks.read_text())
        except FileNotFoundError:
            with _writing(self.path):
                _write_whole(self._tasks, json.dumps(found).encode())
            return
        for name, digest in found.items():
            if kept[name] != digest:
                raise ConfigError(
                    f"the {name} are not those the run {self.path.name!r} was started with: "
                    "give the same, or start a new run"
                )

    def secret(self) -> bytes:
        """What this run's API keys are minted with; the same after a restart."""
        return self._secret.read_bytes()

    @contextmanager
    def owned(self) -> Generator[None]:
        """Hold the run, so that no other process works on it. A kill lets it go."""
        with _writing(self.path):
            lock = (self.path / "lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"the run {self.path.name!r} is being worked on by another process"
                ) from error
            yield

    def write_report(self, report: dict[str, object]) -> None:
        """Save the final numbers."""
        _write_whole(self.report, json.dumps(report, indent=2).encode())


@contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to {str(path)!r}: {error.strerror}; choose another --dir"
        ) from error


def _write_whole(file: Path, content: bytes, mode: int = 0o666) -> None:
    with whole_file(file) as partial:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)


def _leaves(values: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _digest(tasks: Sequence[JsonValue]) -> str:
    text = json.dumps(list(tasks), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
