"""Several policies in a run of one process: served by name, saved, started from and listed."""

import json
from io import StringIO
from itertools import count
from pathlib import Path

import anyio
import httpx
import pytest
from pydantic import JsonValue
from rich.console import Console

import whet
from whet.app.composition.policies import open_policies
from whet.app.composition.standalone import serve_one
from whet.app.dashboard.pages.overview import read_checkpoints
from whet.app.dashboard.pages.rollout_list import RolloutQuery, read_rollouts
from whet.app.dashboard.run_catalog import FolderCatalog
from whet.app.evaluation.by_policy import print_by_policy
from whet.app.evaluation.model_sources import PolicySet, read_models
from whet.app.inspection.attempt_view import draw_attempt, read_attempt
from whet.app.inspection.run_list import list_runs
from whet.app.run_folder import RunFolder
from whet.config import RunConfig, resolve
from whet.errors import ConfigError
from whet.models.huggingface import LocalPolicy
from whet.store.sqlite import SQLiteStore
from whet.types import Endpoint

replies: list[tuple[int, str]] = []
rewards = count(0.0, 0.1)
"""Different for every attempt: what is sampled does not matter."""


async def post(llm: Endpoint, model: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120, verify=False) as client:
        return await client.post(
            f"{llm.base_url}/chat/completions",
            json={
                "model": model,
                "messages": [{"role": "user", "content": "say it"}],
                "max_tokens": 4,
            },
            headers={"authorization": f"Bearer {llm.api_key}"},
        )


async def team(task: int, llm: Endpoint, llms: dict[str, Endpoint]) -> float:
    """Ask a policy by its name, another by the name of a model in its code, and a frozen one."""
    assert llm.model == "planner"
    assert set(llms) == {"policy", "planner", "worker", "critic"}
    for model in (llms["planner"].model, "gpt-5-mini", llms["critic"].model, "policy"):
        reply = await post(llm, model)
        replies.append((reply.status_code, reply.text))
    return next(rewards)


@pytest.mark.slow
def test_a_run_of_several_policies_serves_saves_and_lists_each(tmp_path: Path) -> None:
    replies.clear()
    result = whet.train(
        team,
        [0],
        dir=str(tmp_path),
        name="first",
        steps=1,
        tasks_per_step=1,
        group_size=4,
        policies={
            "planner": {"trainer": {"lora_rank": 2}},
            "worker": {"models": ["gpt-5-mini"]},
            "critic": {"frozen": True},
        },
        runner={"processes": 0},
        quiet=True,
    )
    refused = [text for status, text in replies if status != 200]
    assert len(refused) == 4
    assert "this endpoint serves 'planner', 'worker', 'gpt-5-mini', 'critic'" in refused[0]
    assert result.steps[0].metrics["calls"] == 12

    folder = RunFolder(tmp_path / "runs" / "first")
    anyio.run(check_calls, folder)
    for place in (folder.model, folder.checkpoints / "step-000000"):
        assert sorted(path.name for path in place.iterdir()) == ["planner", "worker"]
    assert "It is the policy 'worker'" in (folder.model / "worker" / "README.md").read_text()
    assert list_runs(tmp_path)[0].model == "tiny: planner, worker, critic"
    for source in (folder.path, folder.checkpoints / "step-000000"):
        with pytest.raises(ConfigError, match="has several policies: name one of them"):
            whet.train(team, [0], dir=str(tmp_path), model=str(source), quiet=True)
    check_evaluation(tmp_path)
    check_serving(tmp_path)
    anyio.run(check_listings, folder)
    for place in (folder.model, folder.checkpoints / "step-000000"):
        [model] = read_models([str(place / "planner")], None, print)
        assert model.fingerprint()

    # An adapter is the start of a policy in another run, whose shape it keeps.
    second = whet.train(
        team,
        [0],
        dir=str(tmp_path),
        name="second",
        steps=1,
        tasks_per_step=1,
        group_size=2,
        policies={
            "planner": {"model": str(folder.model / "planner")},
            "worker": {"models": ["gpt-5-mini"]},
            "critic": {"model": str(folder.checkpoints / "step-000000" / "worker"), "frozen": True},
        },
        runner={"processes": 0},
        quiet=True,
    )
    config = json.loads((second.run / "config.json").read_text())
    assert config["policies"]["planner"]["trainer"]["lora_rank"] == 2
    assert config["policies"]["critic"]["initial_weights"].endswith("worker")


def check_evaluation(tmp_path: Path) -> None:
    """A run is evaluated with all its policies, and any other model under all of their names."""
    models = {"base": "tiny", "trained": "first"}
    settings: dict[str, JsonValue] = {"samples": 0}
    runner: dict[str, JsonValue] = {"processes": 0}
    found = whet.evaluate(
        team,
        [0, 1],
        models,
        dir=str(tmp_path),
        name="compared",
        evaluation=settings,
        runner=runner,
        quiet=True,
    )
    assert found.comparison.tasks == 2
    assert list(found.policies) == ["planner", "worker", "critic"]
    for result in found.policies.values():
        assert {name: use.calls for name, use in result.uses.items()} == {"base": 2, "trained": 2}
        assert result.comparison.tasks == 2
    report = json.loads((found.run / "report.json").read_text())
    assert report["policies"]["worker"]["trained"]["calls"] == 2
    console = Console(file=StringIO(), width=200)
    print_by_policy(console, found.policies)
    assert "critic" in console.file.getvalue()  # pyright: ignore
    checkpoint = str(tmp_path / "runs" / "first" / "checkpoints" / "step-000000")
    [at_step] = read_models([checkpoint], None, print, directory=tmp_path)
    assert isinstance(at_step, PolicySet)
    assert at_step.name == "first-step-000000"
    assert set(at_step.models) == {"planner", "worker", "critic"}


def check_serving(tmp_path: Path) -> None:
    """A run is served with all its policies by their names, or one of them is chosen."""
    with whet.serve("first", dir=str(tmp_path), quiet=True) as llm:
        assert (llm.model, llm.policies) == ("planner", ("planner", "worker", "critic"))
        codes = [anyio.run(post, llm, name).status_code for name in (*llm.policies, "gpt-5-mini")]
        assert codes == [200] * 4
        assert "this endpoint serves 'planner'" in anyio.run(post, llm, "first").text
    anyio.run(check_one_policy, resolve({"dir": str(tmp_path)}))


async def check_one_policy(config: RunConfig) -> None:
    async with serve_one("first", config, print, "worker") as gateway:
        assert (await post(gateway.own_endpoint, "worker")).status_code == 200
        assert (await post(gateway.own_endpoint, "planner")).status_code == 404
    for source, policy, message in (
        ("first", "nobody", "no policy 'nobody': expected one of planner, worker, critic"),
        ("first", None, "has several policies: name one of planner, worker, critic"),
        ("tiny", "planner", "has only one policy"),
    ):
        with pytest.raises(ConfigError, match=message):
            async with serve_one(source, config, print, policy):
                pass


async def check_listings(folder: RunFolder) -> None:
    """The dashboard and `whet show` know the policies of rollouts, checkpoints and steps."""
    catalog = FolderCatalog(folder.path.parent.parent)
    try:
        run = await catalog.open(folder.path.name)
        for policy, count in (("worker", 4), ("nobody", 0)):
            page = await read_rollouts(run, RolloutQuery(policy=policy, mode="train"))
            assert len(page["rollouts"]) == count  # pyright: ignore[reportArgumentType]
        [checkpoint] = (await read_checkpoints(run))["checkpoints"]  # pyright: ignore
        assert checkpoint["policies"] == {"planner": 1, "worker": 1}
    finally:
        await catalog.close()


async def check_calls(folder: RunFolder) -> None:
    async with SQLiteStore(folder.store) as store:
        [step] = await store.steps()
        trajectories = await store.trajectories(step.consumed)
        assert len(trajectories) == 4
        for trajectory in trajectories:
            found = [(call.origin.model, call.origin.policy) for call in trajectory.calls]
            assert found == [("planner",) * 2, ("gpt-5-mini", "worker"), ("critic",) * 2]
        view = await read_attempt(store, trajectories[0].attempt.rollout)
    console = Console(file=StringIO(), width=200)
    console.print(draw_attempt(view))
    assert "chat, gpt-5-mini, policy worker: prompt" in console.file.getvalue()  # pyright: ignore


@pytest.mark.anyio
async def test_adapters_on_one_base_share_its_weights() -> None:
    policies = {"a": {}, "b": {"adam": {"lr": 1e-3}}, "c": {"frozen": True}}
    config = resolve({"policies": policies})  # pyright: ignore[reportArgumentType]
    opened = await open_policies(config, None, None, print)
    weights = [policy for policy in opened.weights.values() if isinstance(policy, LocalPolicy)]
    places = [
        {p.data_ptr() for p in policy.model.parameters() if not p.requires_grad}
        for policy in weights
    ]
    assert places[0] == places[1] == places[2]
    own = [{p.data_ptr() for p in each.get_trainable().values()} for each in weights]
    assert own[0]
    assert own[0].isdisjoint(own[1])
    assert not own[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policies": {"a": {"frozen": True}}}, "every policy is frozen"),
        ({"policies": {"a": {}}, "store": "http://127.0.0.1:1"}, "leave out the store"),
        ({"policies": {"a": {}}, "resources": {"a": 1}}, "both a policy and a resource"),
        ({"policies": {"a": {"algorithm": {"name": "grpo2"}}}}, "perhaps 'grpo'"),
        ({"policies": {"a": {"model": "nowhere/at-all"}}}, "nowhere/at-all"),
    ],
)
def test_policies_that_cannot_run_leave_nothing_behind(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        whet.train(team, [0], dir=str(tmp_path), quiet=True, **settings)  # pyright: ignore
    assert not (tmp_path / "runs").exists()


def test_what_runs_one_model_refuses_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an evaluation of models runs one policy"):
        whet.evaluate(team, [0], ["tiny"], dir=str(tmp_path), policies={"a": {}})
    with pytest.raises(ConfigError, match=r"@whet\.algorithm runs one policy"):
        whet.algorithm(lambda store: None).run(team, [0], dir=str(tmp_path), policies={"a": {}})
