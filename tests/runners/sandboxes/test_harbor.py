"""Harbor tasks without a container: what commands may do, and the reward of the tests."""

from collections.abc import Generator
from pathlib import Path

import anyio
import pytest
from pydantic import JsonValue

from support.servers.prepared_model import PreparedModel
from whet.errors import AgentFailed, ConfigError
from whet.runners.environments.environment import EnvironmentName, open_environment
from whet.runners.sandboxes import choose_sandbox

DOCKERFILE = "# a comment\nFROM python:3.12-slim\nWORKDIR /work\nENV UNIT=m\nCOPY data \\\n  data\n"
TEST = """#!/bin/bash
if [ "$(cat sum.txt)" = "5 m" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def works() -> bool:
    try:
        choose_sandbox("bubblewrap")
    except ConfigError:
        return False
    return True


needs_bubblewrap = pytest.mark.skipif(not works(), reason="bubblewrap does not work here")


@pytest.fixture
def model() -> Generator[PreparedModel]:
    model = PreparedModel()
    yield model
    model.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one task."""
    task = tmp_path / "add"
    for name, text in {
        "task.toml": "[agent]\ntimeout_sec = 600\n",
        "instruction.md": "Write the sum of the numbers in data to sum.txt, with the unit.",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/numbers": "2 3",
        "tests/test.sh": TEST,
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    return tmp_path


def attempt(folder: Path, model: PreparedModel, *commands: str) -> float:
    model.replies = [*(f"```sh\n{command}\n```" for command in commands), "It is done."]
    environment = open_environment(EnvironmentName.parse(f"harbor:{folder}"))
    task: JsonValue = {"name": "add"}
    return anyio.run(environment.rollout, task, model.llm)


def seen(model: PreparedModel, turn: int) -> str:
    """The last message that the model got before a turn."""
    return model.requests[turn]["messages"][-1]["content"]


@needs_bubblewrap
def test_the_reward_is_what_the_tests_write(folder: Path, model: PreparedModel) -> None:
    assert attempt(folder, model, "cat data/numbers; ls /tests", 'echo "5 $UNIT" > sum.txt') == 1.0
    assert "sum.txt, with the unit" in seen(model, 0)
    assert seen(model, 1).startswith("2 3")
    assert "(exit code 2)" in seen(model, 1)  # the tests are not there yet
    assert attempt(folder, model, "echo 6 > sum.txt") == 0.0


@needs_bubblewrap
def test_a_command_sees_and_changes_nothing_else(folder: Path, model: PreparedModel) -> None:
    secret = folder / "secret"
    secret.write_text("x")
    attempt(folder, model, f"cat {secret}; touch /usr/x /etc/x; ls /logs; cat /proc/net/dev")
    assert seen(model, 1).count("No such file") == 2
    assert seen(model, 1).count("Read-only file system") == 2
    assert "eth0" not in seen(model, 1)


@needs_bubblewrap
def test_a_reward_of_the_models_own_does_not_count(folder: Path, model: PreparedModel) -> None:
    (folder / "add" / "tests" / "test.sh").write_text("echo broken; exit 3\n")
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
    with pytest.raises(AgentFailed, match=r"wrote no reward \(exit code 3\): broken"):
        attempt(folder, model, forged)


@pytest.mark.parametrize(
    ("dockerfile", "reason"),
    [
        ("FROM a\nRUN pip install pytest\n", "its Dockerfile has RUN pip install pytest"),
        ("FROM a\nRUN true && \\\n  # don't wait\n  true\n", "has RUN true &&"),
        ("FROM a\nCMD echo it's\n", "has CMD echo it's"),
        ("FROM a\nFROM b\n", "2 images"),
        ("FROM a\nCOPY --from=b /x /y\n", "its Dockerfile has COPY"),
        ("FROM a\nCOPY ../../secret .\n", "it copies ../../secret"),
        ("FROM a\nCOPY data /etc/data\n", "it copies files to /etc/data"),
        ("FROM a\nWORKDIR /usr/app\n", "its working directory is /usr/app"),
    ],
)
def test_a_task_that_needs_a_container_is_one_line(
    folder: Path, dockerfile: str, reason: str
) -> None:
    (folder / "add" / "environment" / "Dockerfile").write_text(dockerfile)
    with pytest.raises(ConfigError, match=r"all 1 tasks of .* need a container") as found:
        open_environment(EnvironmentName.parse(f"harbor:{folder}"))
    assert reason in str(found.value)
