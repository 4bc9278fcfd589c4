import signal
import subprocess
import sys
from pathlib import Path

import pytest

from whet.trainers.checkpoint import appear_whole

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from whet.trainers.checkpoint import appear_whole

def write(folder):
    (folder / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

appear_whole(Path(sys.argv[1]), write)
"""


def write(text: str, folder: Path) -> None:
    def one(partial: Path) -> None:
        (partial / "deep").mkdir()
        (partial / "deep" / "weights").write_text(text)

    appear_whole(folder, one)


def read(folder: Path) -> str:
    return (folder / "deep" / "weights").read_text()


@pytest.mark.parametrize("before", [None, "old"])
def test_a_kill_while_writing_leaves_what_was_there_before(
    tmp_path: Path, before: str | None
) -> None:
    folder = tmp_path / "step"
    if before:
        write(before, folder)
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (read(folder) if before else folder.exists()) == (before or False)
    write("new", folder)
    assert read(folder) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_failure_while_writing_leaves_what_was_there_before(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    write("old", folder)

    def fails(partial: Path) -> None:
        (partial / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        appear_whole(folder, fails)
    assert read(folder) == "old"
