"""The coding agents under test: how each is started, and the tool calls that do the task in it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.types import Endpoint

PROMPT = "Make the test in test_sums.py pass."
BROKEN, FIXED = "return a - b", "return a + b"
RUN_TESTS = "python3 -m unittest -q test_sums 2>&1"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

Step = tuple[str, dict[str, Any]]
"""A tool and its arguments."""


@dataclass(frozen=True)
class CodingAgent:
    """A program that is installed as it is published."""

    program: str
    """Below the folder of all agents."""
    arguments: Callable[[Endpoint, Path], Sequence[str]]
    """Arguments for an endpoint and a home folder."""
    steps: Callable[[Path], Sequence[Step]]
    """Tool calls that do the task in a workspace: read, edit, test."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    answers: bool = True
    """Whether the last turn is an answer, and not a tool call."""
    side_calls: int = 0
    """Calls without tools beside the conversation, such as one for a title."""


def write_workspace(folder: Path) -> None:
    """A module with a bug, and the test that shows it."""
    folder.mkdir()
    (folder / "sums.py").write_text(f"def add(a, b):\n    {BROKEN}\n")
    (folder / "test_sums.py").write_text(
        "import unittest\n\nfrom sums import add\n\n\n"
        "class TestSums(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n"
    )


def _claude_arguments(llm: Endpoint, home: Path) -> Sequence[str]:
    return ["-p", PROMPT, "--allowedTools", "Read,Edit,Bash"]


def _claude_steps(work: Path) -> Sequence[Step]:
    file = str(work / "sums.py")
    edit = {"file_path": file, "old_string": BROKEN, "new_string": FIXED}
    return [
        ("Read", {"file_path": file}),
        ("Edit", edit),
        ("Bash", {"command": RUN_TESTS, "description": "Run the tests"}),
    ]


def _codex_arguments(llm: Endpoint, home: Path) -> Sequence[str]:
    provider = {
        "name": "whet",
        "base_url": llm.base_url,
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    settings = [f"model_providers.whet.{k}={json.dumps(v)}" for k, v in provider.items()]
    flags = [word for each in [*settings, "model_provider=whet"] for word in ("-c", each)]
    allowed = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["exec", "-m", llm.model, *flags, *allowed, PROMPT]


def _codex_steps(work: Path) -> Sequence[Step]:
    patch = (
        "apply_patch <<'EOF'\n*** Begin Patch\n*** Update File: sums.py\n@@\n"
        f"-    {BROKEN}\n+    {FIXED}\n*** End Patch\nEOF"
    )
    commands = ["cat sums.py test_sums.py", patch, RUN_TESTS]
    return [("exec_command", {"cmd": command}) for command in commands]


def _opencode_arguments(llm: Endpoint, home: Path) -> Sequence[str]:
    model = {"name": llm.model, "limit": {"context": 100_000, "output": 8_000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": llm.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {llm.model: model},
    }
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    config = {"provider": {"whet": provider}, "enabled_providers": ["whet"], "autoupdate": False}
    (folder / "opencode.json").write_text(json.dumps(config))
    return ["run", "-m", f"whet/{llm.model}", PROMPT]


def _opencode_steps(work: Path) -> Sequence[Step]:
    file = str(work / "sums.py")
    return [
        ("read", {"filePath": file}),
        ("edit", {"filePath": file, "oldString": BROKEN, "newString": FIXED}),
        ("bash", {"command": RUN_TESTS, "description": "Run the tests"}),
    ]


def _mini_arguments(llm: Endpoint, home: Path) -> Sequence[str]:
    return ["-m", f"openai/{llm.model}", "-t", PROMPT, "--yolo", "--exit-immediately", "-l", "0"]


def _mini_steps(work: Path) -> Sequence[Step]:
    edit = f"sed -i 's/{BROKEN}/{FIXED}/' sums.py"
    commands = ["cat sums.py test_sums.py", edit, RUN_TESTS, SUBMIT]
    return [("bash", {"command": command}) for command in commands]


AGENTS = {
    "claude-code": CodingAgent(
        "node_modules/.bin/claude",
        _claude_arguments,
        _claude_steps,
        environment={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    "codex": CodingAgent("node_modules/.bin/codex", _codex_arguments, _codex_steps),
    "opencode": CodingAgent(
        "node_modules/.bin/opencode",
        _opencode_arguments,
        _opencode_steps,
        environment={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        side_calls=1,
    ),
    "mini-swe-agent": CodingAgent(
        "bin/mini",
        _mini_arguments,
        _mini_steps,
        environment={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
        answers=False,
    ),
}
