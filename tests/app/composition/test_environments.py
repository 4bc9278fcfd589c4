"""Environments by name, as far as no other package is needed: an environment of our own."""

import json
import os
import sys
from pathlib import Path

import pytest

from whet.app.cli.main import main
from whet.errors import ConfigError
from whet.runners.environments.environment import EnvironmentName, list_tasks, open_environment
from whet.runners.environments.hosted_agent import load_environment
from whet.runners.loading import get_spec, load_agent

PLANTED = """
from whet.runners.environments.completion import complete

class Words:
    def __init__(self, name, options):
        if name != "animals":
            raise ValueError(f"no words called {name!r}")
        self.options = options

    def list_tasks(self, split, count):
        words = ["cat", "dog"] if split == "train" else ["owl"]
        return [{"word": word} for word in words[:count]]

    async def rollout(self, task, llm):
        messages = [{"role": "user", "content": f"Say {task['word']}."}]
        return len(await complete(llm, messages, max_tokens=self.options.get("max_tokens", 3)))
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path with an entry point, as pip would install it."""
    site = tmp_path / "site"
    info = site / "planted-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "planted_words.py").write_text(PLANTED)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[whet.environments]\nwords = planted_words:Words\n")
    monkeypatch.syspath_prepend(str(site))
    source = Path(__file__).parents[3] / "src"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(source), str(site)]))
    return tmp_path


def test_a_name_has_a_kind_a_name_and_options() -> None:
    name = EnvironmentName.parse("reasoning-gym:chain_sum?min_terms=2&system=Be%20brief&tasks=7")
    assert (name.kind, name.name) == ("reasoning-gym", "chain_sum")
    assert name.list_own_options() == {"min_terms": 2, "system": "Be brief"}
    assert (name.count("train"), name.count("held_out")) == (7, 64)
    assert EnvironmentName.parse("openenv:http://host:8000?action=x").name == "http://host:8000"


@pytest.mark.parametrize("text", ["chain_sum", "reasoning-gym:", ":x", "reasoning-gym:?a=1"])
def test_an_invalid_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="an environment is KIND:NAME"):
        EnvironmentName.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no-such-kind:x", "unknown environment 'no-such-kind': expected one of reasoning-gym"),
        ("inspect:missing.py", "no package 'inspect-ai'|a file with tasks"),
        ("verifiers:x", "no package 'verifiers' in this Python .* --env-python"),
        ("openenv:host:8000", "openenv takes the URL of a running server"),
        ("openenv:http://x?speed=1", "openenv has no option 'speed'"),
        ("harbor:nowhere", "a folder of task folders"),
        ("harbor:nowhere?speed=1", "harbor has no option 'speed'"),
        ("harbor:nowhere?max_turns=many", "'max_turns' is a positive integer; found 'many'"),
        ("openenv:http://x?max_turns=0", "'max_turns' is a positive integer; found 0"),
        ("reasoning-gym:gcd?max_tokens=1.5", "'max_tokens' is a positive integer; found 1.5"),
    ],
)
def test_an_environment_that_cannot_be_opened_is_an_error_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_environment(EnvironmentName.parse(text))


def test_an_entry_point_is_an_environment(planted: Path) -> None:
    agent = load_environment("words:animals?tasks=1")
    assert agent.list_tasks("train") == [{"word": "cat"}]
    assert agent.list_tasks("held_out") == [{"word": "owl"}]
    assert getattr(load_agent(get_spec(agent)), "spec", "") == agent.spec
    with pytest.raises(ConfigError, match="ValueError: no words called 'plants'"):
        list_tasks(EnvironmentName.parse("words:plants"), "train")
    with pytest.raises(ConfigError, match="positive integer; found 0"):
        load_environment("words:animals?tasks=0").list_tasks("train")


def test_another_python_lists_the_tasks_and_its_errors_are_one_line(planted: Path) -> None:
    assert load_environment("words:animals", sys.executable).list_tasks("held_out") == [
        {"word": "owl"}
    ]
    with pytest.raises(ConfigError, match="lists no tasks of 'words:plants': cannot open"):
        load_environment("words:plants", sys.executable).list_tasks("train")
    with pytest.raises(ConfigError, match="expected a Python interpreter for --env-python"):
        load_environment("words:animals", str(planted / "nothing"))


@pytest.mark.slow
@pytest.mark.parametrize("python", [(), ("--env-python", sys.executable)], ids=["here", "other"])
def test_an_environment_is_trained_and_evaluated(
    planted: Path, model: Path, python: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    env = ("--env", "words:animals?max_tokens=2", *python, "--dir", str(planted), "--json")
    small = ("--steps=1", "--tasks-per-step=2", "--group-size=2", "--evaluation.samples=0")
    settings = ("--trainer.weights=full", "--algorithm.name=positive")
    assert main(["train", *env, "--model", str(model), *small, *settings]) == 0
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (trained["steps"], trained["failed_rollouts"], trained["unproven_generations"]) == (
        1,
        0,
        0,
    )
    assert (trained["calls"], trained["tasks"]) == (4, 1)
    assert main(["eval", *env, "--model", str(model), "--evaluation.samples=0"]) == 0
    evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert evaluated["tasks"] == 1


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train a.py:f", "no tasks: name a file with --tasks"),
        ("eval --env words:x a.py:f --model tiny", "found 2 agents, expected one"),
        ("dev a.py:f --env-python python --tasks x", "--env-python is only for --env"),
        ("dev --env nothing", "an environment is KIND:NAME"),
    ],
)
def test_a_command_line_names_its_environment(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert says in capsys.readouterr().err
