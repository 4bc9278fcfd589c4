"""Files that are written whole or not at all."""

import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.io.files import JsonLines, atomic_file, atomic_folder, make_memory_folder

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from whet.io.files import atomic_folder

with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(text: str, folder: Path) -> None:
    with atomic_folder(folder) as partial:
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


def test_the_content_of_a_whole_file_is_on_disk_before_its_name_and_that_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    synced: list[tuple[bool, bool]] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((is_folder, file.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with atomic_file(file) as partial:
        partial.write_text("all")
    assert synced == [(False, False), (True, True)]


def test_a_failure_while_writing_leaves_what_was_there_before(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    write("old", folder)

    def fails() -> None:
        with atomic_folder(folder) as partial:
            (partial / "weights").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fails()
    assert read(folder) == "old"


def test_a_file_is_the_old_one_until_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with atomic_file(file) as partial:
        partial.write_text("old")

    def fails() -> None:
        with atomic_file(file) as partial:
            partial.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fails()
    assert file.read_text() == "old"
    with atomic_file(file) as partial:
        assert not partial.exists()
        partial.write_text("new")
    assert file.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_folder_is_not_replaced_by_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IsADirectoryError), atomic_file(Path()) as partial:
        partial.write_text("whole")


def test_appended_lines_are_read_back(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "below" / "x.jsonl")
    lines.append({"a": 1}, {"b": "ü"})
    lines.append({"c": None}, {"d": "ü\udcff"})
    assert list(JsonLines(lines.path).read()) == [
        {"a": 1},
        {"b": "ü"},
        {"c": None},
        {"d": "ü\udcff"},
    ]


@pytest.mark.parametrize("torn", [b'{"c": ', b'{"c": 3}'])
def test_a_line_without_its_end_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"a": 1}\n{"b": 2}\n' + torn)
    lines = JsonLines(file)
    lines.append({"d": 4})
    assert list(lines.read()) == [{"a": 1}, {"b": 2}, {"d": 4}]


def test_lines_for_which_the_disk_has_no_room_leave_nothing(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x")
    lines.append({"a": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (lines.path.stat().st_size + 4, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            lines.append({"b": 2}, {"c": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines.append({"d": 4})
    assert list(lines.read()) == [{"a": 1}, {"d": 4}]


def test_two_writers_do_not_write_into_each_others_lines(tmp_path: Path) -> None:
    one, two = JsonLines(tmp_path / "x"), JsonLines(tmp_path / "x")
    for number in range(20):
        one.append({"one": number})
        two.append({"two": number})
    assert len(list(one.read())) == 40


def test_an_invalid_line_is_reported(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}\n[1]\n")
    with pytest.raises(ConfigError, match="line 2 is not a JSON object"):
        list(JsonLines(tmp_path / "x").read())


def test_a_path_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        JsonLines(tmp_path / "file" / "x")


def test_files_of_a_folder_have_the_mode_of_new_files(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    with atomic_folder(tmp_path / "model") as partial:
        (partial / "weights").touch(mode=0o600)
    assert (tmp_path / "model" / "weights").stat().st_mode == plain.stat().st_mode


def test_a_folder_in_memory_is_its_owners_and_private(tmp_path: Path) -> None:
    first = make_memory_folder(tmp_path / "run", needed=0, memory=tmp_path)
    assert first is not None
    assert first.parent == tmp_path
    assert first.stat().st_mode & 0o777 == 0o700
    assert make_memory_folder(tmp_path / "run", needed=0, memory=tmp_path) == first
    assert make_memory_folder(tmp_path / "other", needed=0, memory=tmp_path) != first
    assert make_memory_folder(tmp_path / "run", needed=2**62, memory=tmp_path) is None
    assert make_memory_folder(tmp_path / "run", needed=0, memory=tmp_path / "none") is None
    first.chmod(0o777)  # somebody else may have made it
    assert make_memory_folder(tmp_path / "run", needed=0, memory=tmp_path) is None
