"""The airline tasks of tau2-bench itself: they run against the gateway, and their rows are exact.

tau2-bench is not on PyPI and is not installed here: $WHET_ENVIRONMENTS/tau2 is an environment with
it and `whet[runner]`.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

import whet
from support.runs.commands import EXAMPLES, ROOT
from whet.app.run_folder import RunFolder
from whet.models.catalog import resolve_model
from whet.runners.environments.hosted_agent import load_environment
from whet.types import Trajectory

PYTHON = Path(os.environ.get("WHET_ENVIRONMENTS", ".")) / "tau2" / "bin" / "python"
CONTEXT = 16_384

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "WHET_ENVIRONMENTS" not in os.environ or not PYTHON.exists(),
        reason="no tau2-bench in $WHET_ENVIRONMENTS/tau2",
    ),
]


class Everyone:
    """Credits every rollout: a small model solves none of these tasks."""

    async def credit(
        self, groups: Sequence[whet.Group], past: Sequence[whet.StepRecord]
    ) -> list[whet.Credit]:
        return [whet.Credit.even(trajectory, 1.0) for group in groups for trajectory in group]


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """The tiny model with a context for the policy and the tools of the airline."""
    folder = tmp_path / "wide"
    shutil.copytree(resolve_model("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example, as `pip install` leaves it there."""
    info = tmp_path / "site" / "tau2_airline-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tau2-airline\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[whet.environments]\ntau2 = tau2_airline:Tau2\n")
    path = (ROOT / "src", EXAMPLES / "tau2", info.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))


@pytest.mark.usefixtures("installed")
def test_airline_tasks_run_and_only_the_agent_is_trained(wide: Path, tmp_path: Path) -> None:
    agent = load_environment("tau2:airline?tasks=3&max_steps=5&max_tokens=16", str(PYTHON))
    tasks = agent.list_tasks("train")
    assert len(tasks) == 3
    result = whet.train(
        agent,
        tasks,
        model=str(wide),
        dir=str(tmp_path),
        quiet=True,
        steps=1,
        tasks_per_step=3,
        group_size=1,
        algorithm=Everyone(),
        selection={"agents": ["assistant"]},
        runner={"concurrency": 3, "processes": 1, "timeout_s": 1200},
    )
    tokens = {"assistant": 0, "customer": 0}
    for trajectory in read(result.run):
        assert len(trajectory.calls) >= 3
        for call in trajectory.calls:
            tokens[call.origin.agent] += sum(len(one.tokens) for one in call.generations)
    [step] = result.steps
    assert step.metrics["failed_rollouts"] == step.metrics["unproven_generations"] == 0
    assert tokens["customer"] > 0
    assert step.metrics["trained_tokens"] == tokens["assistant"] > 0


def read(folder: Path) -> list[Trajectory]:
    async def load() -> list[Trajectory]:
        async with RunFolder(folder).open_store() as store:
            ids = [record.rollout.id for record in await store.rollouts()]
            return list(await store.trajectories(ids))

    return anyio.run(load)
