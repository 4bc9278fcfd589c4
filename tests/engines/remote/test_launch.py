"""A server that is started: its flags, its deaths, and its end with all its processes."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from whet.config import LocalTrainerConfig, VLLMConfig
from whet.engines.remote.launch import VLLMProcess, required_flags
from whet.errors import ConfigError

PROGRAM = """#!{python}
import os, subprocess, sys, time
if "--fails" in sys.argv:
    sys.exit("error: no such flag --fails")
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({pids!r}, "a") as file:
    file.write(f"{{os.getpid()}} {{worker.pid}} {{' '.join(sys.argv[1:])}}\\n")
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

    def start(self, *flags: str) -> VLLMProcess:
        config = VLLMConfig(command=str(self.path), flags=flags)
        needs = required_flags(
            LocalTrainerConfig(precision="fp32"), max_context=512, max_versions=2
        )
        return VLLMProcess(Path("model"), config, needs, log=self.log)

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
        "Program(Path(sys.argv[1])).start(); time.sleep(600)"
    )
    paths = [str(Path(__file__).parent), *sys.path]
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(program.path.parent)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    soon(program.started)
    [[pid, worker, _]] = program.started()
    starter.kill()
    starter.wait()
    soon(lambda: not lives(pid) and not lives(worker))


def test_it_is_started_again_when_it_dies(program: Program) -> None:
    server = program.start()
    server.mark_ready()
    soon(program.started)
    [[pid, worker, _]] = program.started()
    os.kill(int(pid), 9)
    soon(lambda: len(program.started()) == 2)
    assert not lives(worker), "nothing is left of the one before"
    assert server.startup_error() is None
    server.close()


def test_a_startup_error_has_the_end_of_the_log(program: Program) -> None:
    server = program.start("--fails")
    soon(server.startup_error)
    error = server.startup_error()
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


def test_a_missing_program_is_an_error_that_says_what_to_type(tmp_path: Path) -> None:
    config = VLLMConfig(command=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--engine\.command, or use running .* --engine\.urls"):
        VLLMProcess(tmp_path, config, [], log=tmp_path / "log")
