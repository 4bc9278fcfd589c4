import signal
import subprocess
import sys
from pathlib import Path

import pytest

from whet.durable import whole_file, whole_folder

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from whet.durable import whole_folder

with whole_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(text: str, folder: Path) -> None:
    with whole_folder(folder) as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / "weights").write_text(text)


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

    def fails() -> None:
        with whole_folder(folder) as partial:
            (partial / "weights").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fails()
    assert read(folder) == "old"


def test_a_file_is_the_old_one_until_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    with whole_file(file) as partial:
        partial.write_text("old")

    def fails() -> None:
        with whole_file(file) as partial:
            partial.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fails()
    assert file.read_text() == "old"
    with whole_file(file) as partial:
        assert not partial.exists()
        partial.write_text("new")
    assert file.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["said.json"]
