"""The four processes of a run, and somebody who kills them."""

import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from pydantic import JsonValue

RUN = "killed"
AGENTS = Path(__file__).parents[1] / "agents"

PATIENCE_S = 1500
"""A busy machine is slow, not stuck."""


class Process:
    """A process of the run, that is started again some time after it was killed."""

    def __init__(self, command: Sequence[str], ready: str, folder: Path) -> None:
        self.name = command[0]
        self._command = [sys.executable, "-m", "whet", *command]
        self._ready = ready
        self._log = folder / f"{self.name}.log"
        self._env = {**os.environ, "JOURNAL": str(folder)}
        self._due = 0.0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            self._begins = log.tell()
            return subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._env, cwd=AGENTS
            )

    def kill(self, pause_s: float) -> None:
        """Kill it now, to be started again after a pause."""
        assert self._process.poll() is None, f"{self.name} ended by itself: {self.read_log()}"
        self._process.kill()
        self._process.wait()
        self._due = time.monotonic() + pause_s

    def look_after(self) -> None:
        """Start it again if that is due; it is an error if it ended by itself."""
        if self._process.poll() == -signal.SIGKILL and time.monotonic() >= self._due:
            self._process = self._start()
        assert self._process.poll() in (None, -signal.SIGKILL) or self.is_done, (
            f"{self.name} ended by itself: {self.read_log()}"
        )

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        return self.is_alive and self._ready in self.read_log()

    @property
    def is_done(self) -> bool:
        return self._process.poll() == 0

    def read_log(self) -> str:
        """Since it was started last."""
        with self._log.open("rb") as log:
            log.seek(self._begins)
            return log.read().decode(errors="replace")


@contextmanager
def four_processes(
    folder: Path, tasks: Sequence[JsonValue], settings: Mapping[str, JsonValue]
) -> Generator[dict[str, Process]]:
    """Store, gateway, runner and training of one run, at work in a folder."""
    port, directory = _free_port(), ["--dir", str(folder / "whet")]
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    place = ["--store", f"http://127.0.0.1:{port}", "--run", RUN, *directory]
    flags = [f"--{key}={value}" for key, value in settings.items()]
    agent = ["journaling_agent:answer", "--concurrency=4", "--lease=5", "--worker=journaling"]
    commands = {
        "store listens": ["store", "--port", port, *directory],
        "gateway listens": ["serve", *place, "--gateway.port", _free_port()],
        "joined run": ["runner", *place, *agent],
        "runner journaling joined": ["train", *place, "--tasks", str(file), *flags],
    }
    with ExitStack() as stack:
        processes: dict[str, Process] = {}
        for ready, command in commands.items():
            process = Process(command, ready, folder)
            stack.callback(process.stop)
            processes[process.name] = process
        yield processes


class Killer:
    """Kills processes at moments that a seed decides.

    The run is held back where it is ahead of the kills, so that it does not end before them.
    """

    def __init__(self, processes: dict[str, Process], folder: Path, steps: int, seed: int) -> None:
        self._processes = processes
        self._hold = folder / "hold"
        self._store = folder / "whet" / "store.db"
        self._steps = steps
        self._draw = random.Random(seed)
        self._share = 0.0
        """Of the kills that were done."""
        self._ends = time.monotonic() + PATIENCE_S
        self.killed = Counter[str]()

    def kill_each(self, times: int) -> None:
        """Kill every process so often, in any order; each is started again."""
        victims = list(self._processes.values()) * times
        self._draw.shuffle(victims)
        for number, victim in enumerate(victims):
            self._share = number / len(victims)
            self._until(lambda victim=victim: victim.is_alive)
            if self._draw.random() < 0.75:  # else perhaps while it starts
                self._until(lambda victim=victim: victim.is_ready)
            moment = time.monotonic() + self._draw.uniform(0, 2.5)
            self._until(lambda moment=moment: time.monotonic() >= moment)
            victim.kill(pause_s=self._draw.uniform(0, 1.5))
            self.killed[victim.name] += 1

    def let_finish(self) -> None:
        """Kill nobody any more, and wait for the training to end."""
        self._share = 1.0
        self._until(lambda: self._processes["train"].is_done)

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            for process in self._processes.values():
                process.look_after()
            if self._steps_done() < self._share * self._steps or self._share == 1:
                self._hold.unlink(missing_ok=True)
            else:
                self._hold.touch()
            assert time.monotonic() < self._ends, {
                name: process.read_log()[-2000:] for name, process in self._processes.items()
            }
            time.sleep(0.05)

    def _steps_done(self) -> int:
        if not self._store.exists():
            return 0
        with closing(sqlite3.connect(f"file:{self._store}?mode=ro", uri=True)) as db:
            try:
                return db.execute("SELECT count(*) FROM step").fetchone()[0]
            except sqlite3.OperationalError:  # its tables are being made, or it is being opened
                return 0


def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])
