"""Folder of a run, locked by one process at a time."""

import difflib
import errno
import fcntl
import gzip
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue, ValidationError

from whet.app.composition.distributed import DATABASE, STORE_VARIABLE
from whet.app.inputs import TaskMix
from whet.config import UNIONS, RunConfig, explain, list_leaves, merge, resolve
from whet.errors import ConfigError
from whet.io.files import JsonLines, atomic_file
from whet.io.text import format_count
from whet.models.card import write_card
from whet.protocols import Store
from whet.store import DEFAULT_RUN, open_store
from whet.store.sqlite import SQLiteStore, check_file
from whet.types import GenerationId

MAY_CHANGE = frozenset(
    {
        "algorithm.logged_keys",
        "algorithm.reward_keys",
        "budget.minutes",
        "budget.tokens",
        "checkpoints.every",
        "checkpoints.keep",
        "dashboard.host",
        "dashboard.port",
        "dashboard.serve",
        "engine.command",
        "engine.device",
        "engine.flags",
        "engine.kind",
        "engine.kv_tokens",
        "engine.replicas",
        "engine.urls",
        "evaluation.every",
        "evaluation.patience",
        "gateway.host",
        "gateway.port",
        "gateway.processes",
        "runner.concurrency",
        "runner.lease_s",
        "runner.processes",
        "runner.ray",
        "runner.ray_cpus",
        "runner.ray_runners",
        "runner.tracer",
        "steps",
        "tracking.mlflow_uri",
        "tracking.names",
        "tracking.project",
        "tracking.wandb_mode",
        "trainer.gpus",
        "trainer.micro_batch_tokens",
        "trainer.python",
        "trainer.shard",
    }
)
"""Keys that a resumed run may change: where, how fast and how long it runs, not what it learns."""


def check_steps(config: RunConfig, done: int) -> None:
    """Raise ConfigError if a run has more steps than its config wants."""
    if done > config.steps:
        raise ConfigError(
            f"the run has {format_count(done, 'step')} already, found steps {config.steps}: leave "
            f"it out, or give at least {done}"
        )


class RunFolder:
    """`<dir>/runs/<name>/`: config, store, checkpoints, trained model and report of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.store = path / "store.db"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        """Published weights, which engines of other processes load."""
        self.model = path / "model"
        self.picture = path / "curve.png"
        self.report = path / "report.json"
        self.metrics = path / "metrics.jsonl"
        self.models = path / "models.jsonl"
        """Models of an evaluation, each with its source."""
        self._log_ratios = path / "log_ratios"
        self._is_new = False
        self._kind = path / "kind"
        self._secret = path / "gateway.key"
        self._tasks = path / "tasks.json"

    @classmethod
    def create(cls, config: RunConfig, kind: str) -> "RunFolder":
        """Create the folder of a new run. Raises ConfigError if it exists or cannot be written."""
        name = config.name or f"{kind}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        folder = cls(config.dir / "runs" / name)
        with _report_write_errors(folder.path):
            folder._check_new()  # before the lock, which a running run holds
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            with folder.lock():  # of two that begin at once, the second finds the run of the first
                folder._check_new()
                _write_whole(folder._kind, kind.encode())
                _write_whole(folder._secret, secrets.token_bytes(32), mode=0o600)
                # Last: a folder with a config is a run.
                folder.save_config(config.model_copy(update={"name": name}))
        folder._is_new = True
        return folder

    def _check_new(self) -> None:
        if self.config_file.exists():
            name = self.path.name
            found, other = f"the run {name!r} exists already", "or choose another name"
            raise ConfigError.phrase(
                python=f"{found}: continue it with resume=True, {other}",
                command=f"{found}: continue it with --resume {name}, {other}",
            )

    @classmethod
    def find_latest(cls, directory: Path, kind: str) -> "RunFolder":
        """Find the newest run of a kind. Raises ConfigError if none exists."""
        runs = sorted((directory / "runs").glob("*/config.json"), key=lambda p: p.stat().st_mtime)
        for file in reversed(runs):
            folder = cls(file.parent)
            if folder._kind.is_file() and folder._kind.read_text() == kind:
                return folder
        found = f"there is no run to resume in {str(directory / 'runs')!r}"
        raise ConfigError.phrase(
            python=f"{found}: start one without resume=True",
            command=f"{found}: start one without --resume",
        )

    @classmethod
    def to_resume(cls, config: RunConfig, kind: str, *, in_store: bool = False) -> "RunFolder":
        """The run of a kind that a config names, or the newest. `in_store`: its store is elsewhere.

        Raises:
            ConfigError: there is none, it is of another kind, or it has lost its store.
            StoreError: another version of whet wrote it.
        """
        folder = (
            cls(config.dir / "runs" / config.name)
            if config.name
            else cls.find_latest(config.dir, kind)
        )
        if not folder.config_file.exists():
            raise cls._explain_missing(folder.path.name, config.dir)
        if folder.store.exists():
            check_file(folder.store)
        elif not in_store:
            folder.check_store(steps=0)  # before the run makes an empty one
        folder.read_config()
        if (found := folder.read_kind()) != kind:
            raise ConfigError(
                f"the run {folder.path.name!r} is of the kind {found!r}, expected {kind!r}: "
                "continue it with the command that began it, or choose another name"
            )
        return folder

    @classmethod
    def find(cls, name: str | Path, directory: Path) -> "RunFolder":
        """A run by its folder, or by its name in a directory of runs. Raises ConfigError."""
        for path in (Path(name).expanduser(), directory / "runs" / name):
            if (path / "config.json").is_file() and (path / "kind").is_file():
                return cls(path)
        raise cls._explain_missing(name, directory)

    @staticmethod
    def _explain_missing(name: str | Path, directory: Path) -> ConfigError:
        names = [path.parent.name for path in (directory / "runs").glob("*/config.json")]
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return ConfigError(
            f"there is no run {str(name)!r}: {hint}expected a folder of a run, or a name in "
            f"{str(directory / 'runs')!r}"
        )

    def keep(self) -> None:
        """Keep the folder from now on: the run has started."""
        self._is_new = False

    def discard_if_new(self) -> None:
        """Delete a folder created by this object for a run that did not start."""
        if self._is_new:
            shutil.rmtree(self.path, ignore_errors=True)

    def read_kind(self) -> str:
        """Read which command made the run: `train`, `dev`, `eval` and so on."""
        return self._kind.read_text() if self._kind.is_file() else ""

    def list_models(self) -> list[str]:
        """Names of the models of an evaluation, each a run of its store; none of another run."""
        if not self.models.is_file():
            return []
        return [line["name"] for line in JsonLines(self.models).read()]

    def save_log_ratios(self, step: int, found: Mapping[GenerationId, Sequence[float]]) -> None:
        """Write the log-ratios of a step's trained tokens, which are for display only."""
        rounded = {id: [round(value, 3) for value in values] for id, values in found.items()}
        with _report_write_errors(self.path):
            self._log_ratios.mkdir(exist_ok=True)
            content = gzip.compress(json.dumps(rounded).encode(), compresslevel=1, mtime=0)
            _write_whole(self._log_ratios / f"step-{step:06d}.json.gz", content)

    def read_log_ratios(self, step: int) -> dict[str, list[float | None]]:
        """Read the log-ratios of a step, by generation; none if they are not here."""
        try:
            content = gzip.decompress((self._log_ratios / f"step-{step:06d}.json.gz").read_bytes())
            return json.loads(content)
        except (OSError, EOFError, ValueError):
            return {}

    def is_in_use(self) -> bool:
        """Whether a process owns the run right now."""
        try:
            with (self.path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def read_config(self) -> RunConfig:
        """Read the config the run was started with. Raises ConfigError if this is not a run."""
        try:
            return RunConfig.model_validate_json(self.config_file.read_text())
        except OSError as error:
            raise ConfigError(f"{str(self.path)!r} is not a run: it has no config.json") from error
        except ValidationError as error:
            raise ConfigError(f"{str(self.config_file)!r}: {explain(error)}") from error

    def read_resumed_config(self, values: Mapping[str, JsonValue]) -> RunConfig:
        """The config to continue with: the saved one, with new values where they may change.

        Raises:
            ConfigError: this is not a run, or a value differs from what it was started with.
        """
        saved = self.read_config().model_dump(mode="json")
        changes = {key: value for key, value in values.items() if key not in ("dir", "name")}
        config = resolve(merge(_drop_other_kinds(saved, changes), changes))
        before = dict(list_leaves(saved))
        for key, value in list_leaves(config.model_dump(mode="json")):
            if key not in MAY_CHANGE and value != before.get(key):
                raise ConfigError(
                    f"a resumed run keeps its config: {key!r} is {before.get(key)!r} there, found "
                    f"{value!r}; leave it out, or start a new run"
                )
        check_steps(config, max(self.count_reported_steps(), len(self.read_rewards())))
        return config

    def save_config(self, config: RunConfig) -> None:
        """Write the config. Raises ConfigError if the folder cannot be written."""
        with _report_write_errors(self.path):
            _write_whole(self.config_file, config.model_dump_json(indent=2).encode())

    def resume(self, values: Mapping[str, JsonValue]) -> None:
        """Save `read_resumed_config` to continue with. Raises ConfigError also if it is in use."""
        config = self.read_resumed_config(values)
        with self.lock():
            self.save_config(config)

    def keep_tasks(self, tasks: Sequence[JsonValue], held_out: Sequence[JsonValue]) -> None:
        """Save a digest of the tasks. Raises ConfigError if the run was started with others.

        Rollouts are identified by id: with other tasks, a resumed run would mix the scores of two
        datasets, and take the trained model's for the base's.
        """
        shares = tasks.shares if isinstance(tasks, TaskMix) else []
        self.keep_inputs({"tasks": [*tasks, *shares], "held-out tasks": held_out})

    def keep_inputs(self, inputs: Mapping[str, Sequence[JsonValue]]) -> None:
        """Save a digest of each input. Raises ConfigError if the run was started with others."""
        found = {name: _digest(values) for name, values in inputs.items()}
        try:
            kept = json.loads(self._tasks.read_text())
        except FileNotFoundError:
            with _report_write_errors(self.path):
                _write_whole(self._tasks, json.dumps(found).encode())
            return
        for name, digest in found.items():
            if kept.get(name) != digest:
                raise ConfigError(
                    f"the {name} are not those the run {self.path.name!r} was started with: "
                    "give the same, or start a new run"
                )

    def read_secret(self) -> bytes:
        """Read the secret of the run's API keys, which is the same after a restart."""
        return self._secret.read_bytes()

    @asynccontextmanager
    async def open_store(self, run: str = DEFAULT_RUN) -> AsyncGenerator[SQLiteStore]:
        """The run's own store. For the process that owns the run: earlier workers are dead."""
        async with SQLiteStore(self.store, run=run) as store:
            await store.release_workers()
            yield store

    def open_records(self, store: str | None = None) -> Store:
        """Open the store with the run's records to read them, also while the run is in use.

        It is `store`, the run's own file, or that of `whet store`.

        Raises:
            ConfigError: the records are in none of these.
        """
        path = self.path.resolve()
        if store is None and self.store.exists():
            return open_store(self.store)
        shared = path.parent.parent / DATABASE
        named = store or os.environ.get(STORE_VARIABLE)
        if address := named or (shared if shared.exists() else None):
            return open_store(address, run=path.name)
        found = f"no records of {str(self.path)!r} on this machine"
        raise ConfigError.phrase(
            python=f"{found}: name their store, or set {STORE_VARIABLE}",
            command=f"{found}: name their store with --store, or set {STORE_VARIABLE}",
        )

    @contextmanager
    def lock(self) -> Generator[None]:
        """Lock the run against other processes. A kill releases it."""
        with _report_write_errors(self.path):
            lock = (self.path / "lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"the run {self.path.name!r} is in use by another process: stop that first, or "
                    "choose another name"
                ) from error
            yield

    def check_store(self, steps: int) -> None:
        """Raise ConfigError if the store has fewer steps than the folder has seen committed."""
        seen = max(self.count_reported_steps(), len(self.read_rewards()))
        if steps < seen:
            had = format_count(seen, "step")
            raise ConfigError(
                f"the run {self.path.name!r} had {had}, its store has {steps}: restore the store, "
                "or start a new run from the model or a checkpoint of this one"
            )

    def count_reported_steps(self) -> int:
        """Steps in the report of a run; 0 without one."""
        return int(self.read_report().get("steps") or 0)

    def read_report(self) -> dict[str, Any]:
        """Read the final numbers; empty without a report, or if it is damaged."""
        return read_object(self.report) if self.report.is_file() else {}

    def read_rewards(self) -> list[float | None]:
        """Mean reward of each step so far, from the metrics; none without `jsonl` tracking."""
        rewards: list[float | None] = []
        if not self.metrics.is_file():
            return rewards
        for line in self.metrics.read_bytes().splitlines():
            with suppress(ValueError):  # a last line that is being written
                match json.loads(line):
                    case {"kind": "step", "step": int(step), **metrics}:
                        rewards += [None] * (step - len(rewards))
                        rewards[step - 1] = metrics.get("reward")
                    case _:
                        pass
        return rewards

    def write_report(self, report: dict[str, object]) -> None:
        """Save the final numbers, also as the card of the trained model."""
        _write_whole(self.report, json.dumps(report, indent=2).encode())
        config = self.read_config()
        for name in config.trained_policies:
            model, run = (self.model / name, self.model / name) if name else (self.model, self.path)
            if model.is_dir():
                own = config.for_policy(name)
                write_card(model, run, self._kind.read_text(), own, report, policy=name)


def read_object(file: Path) -> dict[str, Any]:  # Any: a JSON value, by a name that is known
    """Read a file with a JSON object; empty if it is damaged."""
    try:
        found = json.loads(file.read_text())
    except ValueError:
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


@contextmanager
def _report_write_errors(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        found = f"cannot write to {str(path)!r}: {error.strerror}"
        if error.errno == errno.ENOSPC:
            raise ConfigError(found) from error
        raise ConfigError.phrase(
            python=f"{found}; choose another dir", command=f"{found}; choose another --dir"
        ) from error


def _write_whole(file: Path, content: bytes, mode: int = 0o666) -> None:
    with atomic_file(file) as partial:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)


def _drop_other_kinds(
    saved: dict[str, JsonValue], changes: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """The saved values without the keys that a section's new kind does not have."""
    values = dict(saved)
    for name, members in UNIONS.items():
        change, section = changes.get(name), saved[name]
        assert isinstance(section, dict)
        if isinstance(change, dict) and change.get("kind", section["kind"]) != section["kind"]:
            for member in members:
                if member.model_fields["kind"].default == change["kind"]:
                    values[name] = {k: v for k, v in section.items() if k in member.model_fields}
    return values


def _digest(tasks: Sequence[JsonValue]) -> str:
    text = json.dumps(list(tasks), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
