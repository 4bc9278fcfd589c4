"""Defaults of real SDKs that harm training are found and reported by the runner."""

from pathlib import Path

import pytest

from integrations.sdks.agent_run import GROUP, TASKS, AgentRun, Runner, run_agent
from integrations.sdks.environments import python_of
from integrations.sdks.recipes import SUITE

pytestmark = pytest.mark.slow

UNUSED_URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("pins", "agent", "warning"),
    [
        ("openai-agents", "agents_with_traces", "set OPENAI_AGENTS_DISABLE_TRACING=1"),
        ("crewai", "crewai_with_telemetry", "set CREWAI_DISABLE_TELEMETRY=true"),
        ("openai", "openai_at_another_url", "does 'openai' use another server or key?"),
        ("openai", "no_model_call", "made no model call"),
    ],
)
def test_a_known_pitfall_is_found_and_reported_once(
    pins: str, agent: str, warning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_warning(run_bad_agent(pins, agent, tmp_path, monkeypatch), warning)


def test_a_cache_that_gives_a_group_one_sample_many_times_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_bad_agent("dspy", "dspy_with_its_cache", tmp_path, monkeypatch, concurrency=1)
    check_warning(run, "write dspy.LM(..., cache=False)")
    assert run.step.metrics["rollouts_without_calls"] == TASKS * (GROUP - 1)


def check_warning(run: AgentRun, text: str) -> None:
    """Check that the runner printed it in one line, once, and that the store has it."""
    [line] = [line for line in run.log.splitlines() if text in line]
    assert line.startswith("warning: ")
    assert [kept for kept in run.warnings if text in kept]


def run_bad_agent(
    pins: str, agent: str, folder: Path, patch: pytest.MonkeyPatch, *, concurrency: int = 6
) -> AgentRun:
    environment = {
        "ANOTHER_URL": UNUSED_URL,
        "DSPY_CACHEDIR": str(folder / "cache"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": UNUSED_URL,
    }
    agent = f"{SUITE / 'bad_defaults.py'}:{agent}"
    return run_agent(Runner(python_of(pins), agent, environment, concurrency), folder, patch)
