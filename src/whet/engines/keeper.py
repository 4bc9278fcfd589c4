"""Keeps a server running: `python -m whet.engines.keeper LOG COMMAND...`.

A process of its own, so that the server ends with whoever wanted it, however that one went: the
keeper's stdin then closes. It says `died CODE` on stdout each time it starts the server again.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
HEALTHY_S = 120.0
"""Who lived so long before it died is started again at once."""
MOST_DEATHS = 6
"""In a row, each after less than that: it will not get better."""
PATIENCE_S = 20.0
"""For a server that was asked to stop."""


def main(argv: Sequence[str]) -> int:
    """Run the command until stdin closes, or it will not get better."""
    log, *command = argv
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
    deaths, pause, code = 0, FIRST_PAUSE_S, 0
    while not stopped.is_set() and deaths < MOST_DEATHS:
        began = time.monotonic()
        code = _run(command, Path(log), wake)
        if stopped.is_set():
            return 0
        if time.monotonic() - began > HEALTHY_S:
            deaths, pause = 0, FIRST_PAUSE_S
        deaths += 1
        sys.stdout.write(f"died {code}\n")
        sys.stdout.flush()
        wake.clear()
        stopped.wait(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return code


def _run(command: Sequence[str], log: Path, wake: threading.Event) -> int:
    """Run it once; it has ended with all its own processes when this returns."""
    with log.open("ab") as out:
        # A group of its own: what the server starts is stopped with it.
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
        child.wait(PATIENCE_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
