"""The runs of a folder, also while other processes write and delete them."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from whet.app.inspection.run_list import EVALUATION_KIND, find_newest, list_runs
from whet.app.run_folder import RunFolder
from whet.config import resolve
from whet.errors import ConfigError


def test_runs_are_listed_while_their_checkpoints_come_and_go(tmp_path: Path) -> None:
    folder = RunFolder.create(resolve({"dir": str(tmp_path), "name": "a"}), "train")
    ended = threading.Event()

    def train() -> None:
        while not ended.is_set():
            for name in ("step-0", "step-1"):
                checkpoint = folder.checkpoints / name
                checkpoint.mkdir()
                (checkpoint / "weights").touch()
                shutil.rmtree(checkpoint)

    training = threading.Thread(target=train)
    training.start()
    try:
        found = [[run.name for run in list_runs(tmp_path)] for _ in range(300)]
    finally:
        ended.set()
        training.join()
    assert found == [["a"]] * 300


def test_the_newest_run_may_be_looked_for_among_some_kinds_only(tmp_path: Path) -> None:
    for name, kind in (("a", "train"), ("b", EVALUATION_KIND)):
        folder = RunFolder.create(resolve({"dir": str(tmp_path), "name": name}), kind)
        os.utime(folder.config_file, (ord(name), ord(name)))

    assert find_newest(tmp_path, excluded=(EVALUATION_KIND,)) == "a"
    with pytest.raises(ConfigError, match="no runs"):
        find_newest(tmp_path, excluded=("train", EVALUATION_KIND))
