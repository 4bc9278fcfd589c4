"""The dashboard of `whet store`, as another terminal and a browser reach it."""

import json
from pathlib import Path
from shutil import copyfile

import httpx
import pytest

from support.runs.processes import start
from whet.app.cli.main import main
from whet.app.run_folder import RunFolder


def test_a_new_link_and_the_list_of_rollouts_come_from_a_running_store(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copyfile(folder.store, tmp_path / "store.db")
    with start(tmp_path, "store", "--dir", str(tmp_path), "--port", "0") as store:
        url = store.hears("dashboard http").split()[1].split("/#")[0]
        address = ("--store", url, "--dir", str(tmp_path))
        assert main(["view", "default", *address]) == 0
        link, code = capsys.readouterr().out.strip().split("?code=")
        assert link == f"{url}/#/r/default"
        with httpx.Client(base_url=url, timeout=60) as browser:
            assert browser.get("/").status_code == 200
            assert browser.get("/api/runs").status_code == 401
            assert browser.post("/api/session", json={"code": code}).status_code == 200
            [run] = browser.get("/api/runs").json()["runs"]
            assert (run["name"], run["steps"]) == ("default", 2)
            page = browser.get("/api/runs/default/rollouts?status=failed").json()
        assert main(["rollouts", "default", "--failed", "--json", *address]) == 0
        assert json.loads(capsys.readouterr().out) == page["rollouts"]
        assert main(["rollouts", "default", "--task", "none", *address]) == 2
        assert "there is no rollout 'none'" in capsys.readouterr().err
        assert main(["rollouts", "default", "--step", "9", *address]) == 2
        assert "invalid --step 9: the run has steps 1 to 2" in capsys.readouterr().err
    assert main(["view", *address]) == 2
    assert "cannot reach the store" in capsys.readouterr().err
