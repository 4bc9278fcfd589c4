"""Started servers: their flags, their crashes, and their end with all processes."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from whet.config import LocalTrainerConfig, VLLMConfig
from whet.engines.remote.launch import VLLMProcess, build_required_flags
from whet.engines.remote.placement import list_visible_gpus, place_servers
from whet.errors import ConfigError

PROGRAM = """#!{python}
import os, subprocess, sys, time
if "--fails" in sys.argv:
    sys.exit("error: no such flag --fails")
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({pids!r}, "a") as file:
    file.write(f"{{os.getpid()}} {{worker.pid}} {{' '.join(sys.argv[1:])}}\\n")
with open({pids!r} + ".gpus", "w") as file:
    file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
time.sleep(600)
"""


class Program:
    """Stands for `vllm`: it starts a worker, and both live until they are killed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "vllm"
        self.pids = folder / "pids"
        self.path.write_text(PROGRAM.format(python=sys.executable, pids=str(self.pids)))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)
        self.log = folder / "vllm.log"

    def start(self, *flags: str, **place: Any) -> VLLMProcess:
        config = VLLMConfig(command=str(self.path), flags=flags)
        needs = build_required_flags(
            LocalTrainerConfig(precision="fp32"), max_context=512, max_versions=2
        )
        return VLLMProcess(Path("model"), config, needs, log=self.log, **place)

    def started(self) -> list[list[str]]:
        """Of each time it was started: two process ids, and its arguments."""
        lines = self.pids.read_text().splitlines() if self.pids.is_file() else []
        return [line.split(" ", 2) for line in lines]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def soon(true: Callable[[], object]) -> None:
    limit = time.monotonic() + 20
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def lives(pid: str) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
    return bool(listed.stdout.strip()) and not listed.stdout.startswith("Z")


def test_it_ends_with_all_its_processes(program: Program) -> None:
    server = program.start()
    soon(program.started)
    [[pid, worker, _]] = program.started()
    assert lives(pid)
    assert lives(worker)
    server.close()
    server.close()
    soon(lambda: not lives(pid) and not lives(worker))


def test_it_ends_when_the_process_that_started_it_is_killed(program: Program) -> None:
    code = (
        "import os, sys, time; from test_launch import Program; from pathlib import Path\n"
        "folder = Path(sys.argv[1]); Program(folder).start(scratch=folder / 'scratch')\n"
        "time.sleep(600)"
    )
    paths = [str(Path(__file__).parent), *sys.path]
    scratch = program.path.parent / "scratch"
    (scratch / "served").mkdir(parents=True)
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(program.path.parent)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    soon(program.started)
    [[pid, worker, _]] = program.started()
    assert (scratch / "served").is_dir()
    starter.kill()
    starter.wait()
    soon(lambda: not lives(pid) and not lives(worker) and not scratch.exists())


def test_it_is_started_again_when_it_dies(program: Program) -> None:
    server = program.start()
    server.mark_ready()
    soon(program.started)
    [[pid, worker, _]] = program.started()
    os.kill(int(pid), 9)
    soon(lambda: len(program.started()) == 2)
    assert not lives(worker), "nothing is left of the one before"
    assert server.find_startup_error() is None
    server.close()


def test_a_startup_error_has_the_end_of_the_log(program: Program) -> None:
    server = program.start("--fails")
    soon(server.find_startup_error)
    error = server.find_startup_error()
    assert error is not None
    assert error.endswith("ends with: error: no such flag --fails")
    assert str(program.log) in error
    server.close()


def test_flags_of_the_user_are_passed_on_and_win(program: Program) -> None:
    server = program.start("--max-loras=8", "--dtype", "half", "--port", "8123", "--new", "a,b c")
    soon(program.started)
    [[_, _, arguments]] = program.started()
    server.close()
    assert server.url == "http://127.0.0.1:8123"
    assert arguments.startswith("serve model --logprobs-mode processed_logprobs")
    assert arguments.endswith("--max-loras=8 --dtype half --port 8123 --new a,b c")
    assert arguments.count("--dtype") == arguments.count("--port") == 1
    assert arguments.count("--max-loras") == 1
    assert "--max-model-len 512" in arguments
    assert "--enable-lora --max-lora-rank 16" in arguments


def test_it_sees_the_gpus_it_was_given(program: Program) -> None:
    server = program.start(gpus=("2", "3"))
    seen = program.pids.with_name("pids.gpus")
    soon(lambda: seen.is_file() and seen.read_text() == "2,3")
    server.close()


FOUR = ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("gpus", "training", "flags", "replicas", "expected"),
    [
        ((), 1, (), None, [()]),
        ((), 1, (), 2, [(), ()]),
        (("0",), 1, (), None, [()]),
        (("0",), 1, (), 1, [()]),
        (FOUR, None, (), None, [()]),
        (FOUR, 2, (), None, [("2",), ("3",)]),
        (FOUR, 1, (), 2, [("1",), ("2",)]),
        (FOUR, 4, (), None, [()]),
        (FOUR, 2, ("--tensor-parallel-size", "2"), None, [("2", "3")]),
        (FOUR, 0, ("-tp=2",), None, [("0", "1"), ("2", "3")]),
        (FOUR, 1, ("--tensor-parallel-size=4",), None, [()]),
        (("GPU-a", "GPU-b"), 1, (), None, [("GPU-b",)]),
    ],
)
def test_servers_are_placed_on_the_gpus_that_do_not_train(
    gpus: tuple[str, ...],
    training: int | None,
    flags: tuple[str, ...],
    replicas: int | None,
    expected: list[tuple[str, ...]],
) -> None:
    placed = place_servers(gpus, training=training, flags=flags, replicas=replicas)
    assert placed == expected


def test_more_replicas_than_gpus_are_an_error_that_says_how_many_fit() -> None:
    with pytest.raises(ConfigError, match=r"leaves 2 of 4: set engine\.replicas to 2"):
        place_servers(FOUR, training=2, flags=(), replicas=3)
    with pytest.raises(ValidationError, match="leave out --port"):
        VLLMConfig(replicas=2, flags=("--port", "8000"))
    with pytest.raises(ValidationError, match="or leave out urls"):
        VLLMConfig(replicas=2, urls=("http://127.0.0.1:1",))


def test_gpus_are_those_that_this_process_may_use(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert list_visible_gpus({}, tmp_path) == ["2", "10"]
    assert list_visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}, tmp_path) == ["3", "1"]
    assert list_visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_a_missing_program_is_an_error_that_says_what_to_type(tmp_path: Path) -> None:
    config = VLLMConfig(command=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"engine\.command, or use running .* engine\.urls"):
        VLLMProcess(tmp_path, config, [], log=tmp_path / "log")
