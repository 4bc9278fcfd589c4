"""The folder of a run: its config, its name, its lock, and what a resumed run may change."""

import json
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from whet.app.composition.run import open_run
from whet.app.run_folder import RunFolder
from whet.config import RunConfig
from whet.errors import ConfigError


def config(tmp_path: Path, **values: object) -> RunConfig:
    return RunConfig.model_validate({"dir": tmp_path, "name": "a", **values})


def test_the_resolved_config_is_saved_and_read_back(tmp_path: Path) -> None:
    made = config(tmp_path, steps=7, adam={"lr": 0.5})

    folder = RunFolder.create(made, "demo")

    assert folder.path == tmp_path / "runs" / "a"
    assert folder.read_config() == made
    saved = json.loads(folder.config_file.read_text())
    assert saved["steps"] == 7
    assert saved["adam"]["beta2"] == RunConfig().adam.beta2


def test_a_run_without_a_name_gets_one_of_its_own(tmp_path: Path) -> None:
    one = RunFolder.create(RunConfig(dir=tmp_path), "demo")
    two = RunFolder.create(RunConfig(dir=tmp_path), "demo")
    assert one.path != two.path
    assert [folder.read_config().name for folder in (one, two)] == [one.path.name, two.path.name]


def test_a_run_is_not_started_over(tmp_path: Path) -> None:
    RunFolder.create(config(tmp_path), "demo")
    with pytest.raises(ConfigError, match="'a' exists already: continue it with resume=True"):
        RunFolder.create(config(tmp_path), "demo")


def test_of_runs_with_one_name_that_begin_at_once_one_is_created(tmp_path: Path) -> None:
    both_are_ready = threading.Barrier(2)

    def create(_: int) -> str:
        both_are_ready.wait()
        try:
            return RunFolder.create(config(tmp_path), "demo").read_secret().hex()
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        created, refused = sorted(threads.map(create, range(2)), key=lambda text: "run" in text)
    assert created == RunFolder(tmp_path / "runs" / "a").read_secret().hex()
    assert "exists already" in refused or "in use by another process" in refused


def test_a_folder_that_a_kill_left_unfinished_is_not_a_run_and_does_not_block_one(
    tmp_path: Path,
) -> None:
    half = tmp_path / "runs" / "a"
    half.mkdir(parents=True)
    (half / "gateway.key").write_bytes(b"")
    (half / ".config.json.partial").write_text("{")

    with pytest.raises(ConfigError, match="no run to resume"):
        RunFolder.find_latest(tmp_path, "demo")
    folder = RunFolder.create(config(tmp_path), "demo")
    assert len(folder.read_secret()) == 32


@pytest.mark.parametrize("place", ["file/under", "/proc/whet"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write to .*choose another dir"):
        RunFolder.create(config(tmp_path, dir=tmp_path / place), "demo")


def test_the_newest_run_of_the_kind_is_found_whatever_its_name(tmp_path: Path) -> None:
    for age, (name, kind) in enumerate([("old", "demo"), ("new", "demo"), ("other", "train")]):
        folder = RunFolder.create(config(tmp_path, name=name), kind)
        os.utime(folder.config_file, (1000 + age, 1000 + age))

    assert RunFolder.find_latest(tmp_path, "demo").path.name == "new"
    assert RunFolder.find_latest(tmp_path, "train").path.name == "other"
    with pytest.raises(ConfigError, match="start one without resume=True"):
        RunFolder.find_latest(tmp_path, "hello")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        RunFolder(tmp_path / "runs" / "x").read_config()


def test_the_name_of_a_run_to_resume_is_suggested(tmp_path: Path) -> None:
    RunFolder.create(config(tmp_path, name="tried"), "train")
    with pytest.raises(ConfigError, match="there is no run 'tired': did you mean 'tried'"):
        RunFolder.to_resume(config(tmp_path, name="tired"), "train")


def test_a_resumed_run_keeps_what_it_learns(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path, steps=7, seed=7), "demo")
    folder.resume({"seed": "7", "dir": "elsewhere"})
    with pytest.raises(ConfigError, match="keeps its config: 'seed' is 7 there, found 9"):
        folder.resume({"seed": "9"})
    folder.resume({"steps": "9"})
    assert folder.read_config().steps == 9
    with pytest.raises(ConfigError, match=r"'adam\.lr'"):
        folder.resume({"adam": {"lr": 0.5}})
    assert folder.read_config() == config(tmp_path, steps=9, seed=7)


def test_a_run_of_another_kind_is_not_resumed(tmp_path: Path) -> None:
    RunFolder.create(config(tmp_path), "train")
    with pytest.raises(ConfigError, match="'a' is of the kind 'train', expected 'eval'"):
        RunFolder.to_resume(config(tmp_path), "eval")


def test_a_run_that_lost_its_store_is_not_resumed_and_gets_no_empty_one(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path), "sft")
    assert RunFolder.to_resume(config(tmp_path), "sft").path == folder.path  # killed at its start
    folder.write_report({"steps": 4})
    with pytest.raises(ConfigError, match="had 4 steps, its store has 0: restore the store"):
        RunFolder.to_resume(config(tmp_path), "sft")
    assert not folder.store.exists()
    assert RunFolder.to_resume(config(tmp_path), "sft", in_store=True).path == folder.path


def test_a_resumed_run_may_take_another_port_or_device(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path, gateway={"port": 8000}), "demo")
    folder.resume({"gateway": {"port": "8001"}, "engine": {"device": "cpu"}})
    assert folder.read_config().gateway.port == 8001
    assert folder.read_config().engine.device == "cpu"


def test_a_resumed_run_may_read_rewards_otherwise(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path), "demo")
    folder.resume({"algorithm": {"logged_keys": ["reward"], "reward_keys": ["style"]}})
    assert folder.read_config().algorithm.logged_keys == ("reward",)
    assert folder.read_config().algorithm.reward_keys == ("style",)


def test_a_resumed_run_keeps_its_tasks(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path), "demo")
    folder.keep_tasks([{"a": 1, "b": 2}], [])
    folder.keep_tasks([{"b": 2, "a": 1}], [])
    with pytest.raises(ConfigError, match="the tasks are not those the run 'a' was started with"):
        folder.keep_tasks([{"a": 2}], [])
    with pytest.raises(ConfigError, match="the held-out tasks are not those"):
        folder.keep_tasks([{"a": 1, "b": 2}], ["new"])


def test_the_secret_is_the_owners_alone_and_outlives_a_restart(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path), "demo")
    key = folder.path / "gateway.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert RunFolder(folder.path).read_secret() == folder.read_secret()


HOLD = """
import sys
from pathlib import Path
from whet.app.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_owns_a_run_until_it_dies(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path), "demo")
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout
        assert owner.stdout.readline() == "held\n"
        refused = pytest.raises(ConfigError, match="'a' is in use by another process")
        with refused, folder.lock():
            pass
        owner.kill()
    with folder.lock():
        pass


@pytest.mark.anyio
async def test_a_run_that_another_process_began_at_once_is_not_deleted(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path), "demo")
    with RunFolder(folder.path).lock():
        refused = pytest.raises(ConfigError, match="'a' is in use by another process")
        with refused:
            async with open_run(folder, progress=print):
                pass
    assert folder.config_file.exists()


def test_a_resumed_run_may_sample_elsewhere(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path, engine={"max_context": 512}), "demo")
    folder.resume({"engine": {"kind": "vllm", "urls": ["http://a"]}})
    saved = folder.read_config().engine
    assert (saved.kind, saved.max_context) == ("vllm", 512)


def test_a_resumed_run_keeps_its_trainer(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path), "demo")
    with pytest.raises(ConfigError, match=r"'trainer\.kind' is 'local' there, found 'tinker'"):
        folder.resume({"trainer": {"kind": "tinker"}})


@pytest.mark.parametrize(
    ("section", "key"), [("engine", "max_active"), ("trainer", "keep_reference"), (None, "tinker")]
)
def test_a_run_with_a_key_of_another_version_is_refused_in_one_line(
    tmp_path: Path, section: str | None, key: str
) -> None:
    folder = RunFolder.create(config(tmp_path), "demo")
    saved = json.loads(folder.config_file.read_text())
    (saved[section] if section else saved)[key] = {}
    folder.config_file.write_text(json.dumps(saved))
    name = f"{section}.{key}" if section else key
    with pytest.raises(ConfigError, match=rf"config\.json': unknown config key '{name}'") as error:
        folder.read_config()
    assert "\n" not in str(error.value)
