"""The runs of a folder, also while other processes write and delete them."""

import shutil
import threading
from pathlib import Path

from whet.app.inspection.run_list import list_runs
from whet.app.run_folder import RunFolder
from whet.config import resolve


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
