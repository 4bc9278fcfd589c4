"""Restarts a server when it dies: `python -m whet.engines.remote.watchdog LOG SCRATCH COMMAND...`.

A process of its own, so that the server ends with the process that started it, even if that was
killed: the watchdog's stdin then closes. It writes `died CODE` to stdout at each death. SCRATCH is
empty, or a folder to delete in the end.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from whet.io.process import RestartBackoff

MIN_BACKOFF_S = 1.0
HEALTHY_S = 120.0
"""Seconds after which a server that dies is restarted at once: longer than it takes to load."""
STOP_TIMEOUT_S = 20.0
"""Seconds between SIGTERM and SIGKILL."""


def main(argv: Sequence[str]) -> int:
    """Run the command until stdin closes or it dies too often; returns its exit code."""
    log, scratch, *command = argv
    wake, stopped = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        wake.set()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=watch, daemon=True).start()
    backoff = RestartBackoff(first_pause_s=MIN_BACKOFF_S, healthy_s=HEALTHY_S)
    while not stopped.is_set():
        started = time.monotonic()
        code = _run(command, Path(log), wake)
        if stopped.is_set():
            break
        pause_s = backoff.count_death(time.monotonic() - started)
        sys.stdout.write(f"died {code}\n")
        sys.stdout.flush()
        if pause_s is None:
            return code
        wake.clear()
        stopped.wait(pause_s)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _run(command: Sequence[str], log: Path, wake: threading.Event) -> int:
    """Run the command once; when this returns, all its child processes have ended too."""
    with log.open("ab") as out:
        # A process group of its own: children of the server are stopped with it.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    threading.Thread(target=lambda: (child.wait(), wake.set()), daemon=True).start()
    wake.wait()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
