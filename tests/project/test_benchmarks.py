"""The benchmarks that goals are judged by still run; their results are not checked here."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("merge.py", "--turns", "2", "--conversations", "1"), "fewer tokens"),
        (
            (
                "gateway.py",
                "--seconds",
                "0.2",
                "--rounds",
                "1",
                "--concurrency",
                "1",
            ),
            "calls recorded",
        ),
        (("path.py", "--rollouts", "32", "--steps", "1", "--agent", "shared_client"), "idle"),
        (("store.py", "--cycles", "20", "--rounds", "1", "--no-postgres"), "cycles_per_s"),
        (("runners.py", "--rollouts", "100"), "rollouts/s  0 failed"),
        (("learning/overfitting.py",), "stopped: no evaluation since step"),
    ],
    ids=["merge", "gateway", "path", "store", "runners", "overfitting"],
)
def test_a_benchmark_runs(arguments: tuple[str, ...], says: str) -> None:
    program, *options = arguments
    command = [sys.executable, str(ROOT / "bench" / program), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
