"""Defaults of real SDKs that harm training are found and reported by the runner."""

from pathlib import Path

import pytest

from sdks.environments import python_of
from sdks.recipes import HERE
from sdks.trial import GROUP, TASKS, Runner, Trial, try_out

pytestmark = pytest.mark.slow

NOBODY = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("pins", "agent", "said"),
    [
        ("openai-agents", "agents_with_traces", "set OPENAI_AGENTS_DISABLE_TRACING=1"),
        ("crewai", "crewai_with_telemetry", "set CREWAI_DISABLE_TELEMETRY=true"),
        ("openai", "openai_elsewhere", "does 'openai' use another server or key?"),
        ("openai", "nobody_asked", "made no model call"),
    ],
)
def test_a_known_pitfall_is_found_and_reported_once(
    pins: str, agent: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_said(spoiled(pins, agent, tmp_path, monkeypatch), said)


def test_a_cache_that_gives_a_group_one_sample_many_times_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = spoiled("dspy", "dspy_with_its_cache", tmp_path, monkeypatch, concurrency=1)
    check_said(trial, "write dspy.LM(..., cache=False)")
    assert trial.step.metrics["rollouts_without_calls"] == TASKS * (GROUP - 1)


def check_said(trial: Trial, text: str) -> None:
    """The runner said it in one line, once, and the store has it."""
    [line] = [line for line in trial.said.splitlines() if text in line]
    assert line.startswith("warning: ")
    assert [kept for kept in trial.warnings if text in kept]


def spoiled(
    pins: str, agent: str, folder: Path, patch: pytest.MonkeyPatch, *, concurrency: int = 6
) -> Trial:
    environment = {
        "ELSEWHERE": NOBODY,
        "DSPY_CACHEDIR": str(folder / "cache"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": NOBODY,
    }
    agent = f"{HERE / 'spoiled.py'}:{agent}"
    return try_out(Runner(python_of(pins), agent, environment, concurrency), folder, patch)
