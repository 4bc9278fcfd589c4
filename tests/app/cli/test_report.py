"""The report of a run: its comparison, its accounting of tokens, and its layout."""

import io
import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from whet.app.cli.display import (
    Display,
    draw_curve,
    escape_output,
    format_resume,
    print_next,
    print_note,
    report_stopped,
)
from whet.app.cli.main import StderrHandler
from whet.app.cli.report import build_picture, draw_picture, print_report
from whet.app.composition.distributed import print_line
from whet.app.evaluation.comparison import compare
from whet.app.evaluation.statistics import Scores
from whet.app.experiment import Result
from whet.app.run_folder import RunFolder
from whet.config import EvaluationConfig, RunConfig
from whet.training.stopping import EVALUATION
from whet.types import Failure, FailureKind, StepRecord


def record(step: int, reward: float) -> StepRecord:
    metrics = {
        "reward": reward,
        "rollouts": 8.0,
        "calls": 16.0,
        "rows": 6.0,
        "trained_rollouts": 6.0,
        "trained_tokens": 100.0,
        "unproven_generations": 0.0,
        "collect_seconds": 1.5,
        "train_seconds": 0.5,
    }
    return StepRecord(step=step, version=step + 1, checkpoint="x", consumed=(), metrics=metrics)


def result(tmp_path: Path, *, evaluated: bool = True) -> Result:
    failure = Failure(kind=FailureKind.WORKER_LOST, message="the worker died")
    scores = {
        "base": Scores((0.0, 1.0), ((0.0,), (0.0,))),
        "trained": Scores((1.0, 1.0), ((1.0,), (None,)), (failure,)),
    }
    return Result(
        run=tmp_path,
        steps=(record(0, 0.25), record(1, 0.75)),
        comparison=compare(scores, EvaluationConfig()) if evaluated else None,
        seconds=12.34,
    )


def printed(result: Result) -> str:
    text = io.StringIO()
    print_report(Console(file=text, width=100), result)
    return text.getvalue()


def test_the_report_sets_base_against_trained_and_accounts_for_every_token(tmp_path: Path) -> None:
    text = printed(result(tmp_path))

    assert "+100.0 points  [-51, +100]" in text
    assert "1 of 2 held-out tasks" in text
    lost = "trained: 1 evaluation rollouts failed (worker_lost) and are left out, such as: the"
    assert lost in text
    for name, value in [
        ("rollouts", "16"),
        ("rows per rollout", "1.00"),
        ("tokens trained", "200"),
        ("unproven generations", "0"),
    ]:
        assert any(name in line and line.rstrip("│ ").endswith(value) for line in text.splitlines())


def test_without_held_out_tasks_the_report_compares_nothing(tmp_path: Path) -> None:
    text = printed(result(tmp_path, evaluated=False))
    assert "held-out" not in text
    assert "tokens trained" in text


def test_a_run_without_trained_tokens_reports_that_it_trained_nothing(tmp_path: Path) -> None:
    def trained(tokens: float) -> str:
        trained = {"trained_tokens": tokens, "trained_rollouts": tokens}
        metrics = {**record(0, 0.0).metrics, **trained}
        step = record(0, 0.0).model_copy(update={"metrics": metrics})
        return printed(Result(run=tmp_path, steps=(step,), comparison=None, seconds=1.0))

    assert "training data (nothing was trained)" in trained(0.0)
    assert re.search(r"rows per rollout +│ +- ", trained(0.0))
    assert "every trained token was sampled" in trained(3.0)
    assert "nothing was trained" not in trained(3.0)


def test_a_curve_is_drawn_from_two_steps_on(tmp_path: Path) -> None:
    def draw(steps: int) -> str:
        records = tuple(record(n, 0.5) for n in range(steps))
        return printed(Result(run=tmp_path, steps=records, comparison=None, seconds=1.0))

    assert "mean reward of steps 1 to 2" in draw(2)
    assert "mean reward" not in draw(1)


def test_a_terminal_breaks_warnings_between_words_and_no_other_line() -> None:
    text = io.StringIO()
    display = Display(Console(file=text, width=20, force_terminal=True, color_system=None))
    display.note("warning: one two three four five")
    display.note("next: whet show a-long-name --failed")
    assert [line.strip() for line in text.getvalue().splitlines()] == [
        *("warning: one two", "three four five"),
        "next: whet show a-long-name --failed",
    ]


def test_the_numbers_for_machines_are_json(tmp_path: Path) -> None:
    numbers = json.loads(json.dumps(result(tmp_path).as_json()))

    assert numbers["before"]["greedy"] == 0.0
    assert numbers["after"]["greedy"] == 1.0
    assert numbers["gain_ci95"] == [pytest.approx(-0.51, abs=0.01), 1.0]
    assert numbers["after"]["failed"] == 1
    assert numbers["comparison"]["trained"]["failures"]["worker_lost"]["count"] == 1
    assert numbers["steps"] == numbers["tasks"] == 2
    assert numbers["rollouts"] == 16
    assert numbers["calls"] == 32
    assert numbers["rows"] == 12
    assert numbers["trained_tokens"] == 200
    assert numbers["unproven_generations"] == 0
    assert numbers["seconds"] == 12.3
    assert numbers["run"] == str(tmp_path)


def test_a_curve_has_a_column_a_step_and_rises_with_the_values() -> None:
    *body, axis, title = draw_curve([0.0, 0.5, None, 1.0], 80)
    columns = ["".join(line[6 + 2 * i] for line in body) for i in range(4)]
    assert columns == ["      ", "   ███", "      ", "██████"]
    assert axis.index("└") == body[0].index("┤")
    assert title.endswith("mean reward of steps 1 to 4")
    assert draw_curve([None], 80) == []


def test_a_curve_is_scaled_to_values_outside_of_0_and_1() -> None:
    *body, _, _ = draw_curve([-3.0, 2.0, 7.0], 80)
    assert len({len(line) for line in body}) == 1
    assert (body[0][:6], body[-1][:6]) == (" 7.00 ", "-3.00 ")
    columns = ["".join(line[7 + 2 * i] for line in body) for i in range(3)]
    assert columns == ["      ", "   ███", "██████"]


def test_a_curve_of_many_steps_fits_its_width() -> None:
    *body, _, title = draw_curve([0.0, 1.0] * 200, 80)
    assert {len(line) for line in body} == {80}
    assert title.endswith("400")


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    for evaluated in (True, False):
        draw_picture(result(tmp_path, evaluated=evaluated), tmp_path / "curve.png")
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_training_and_held_out_measures_apart(tmp_path: Path) -> None:
    config = RunConfig(model="tiny", name="shop")
    (tmp_path / "config.json").write_text(config.model_dump_json())
    found = result(tmp_path)
    evaluated = found.steps[1].metrics | {f"{EVALUATION}greedy": 0.5}
    steps = (found.steps[0], found.steps[1].model_copy(update={"metrics": evaluated}))
    figure = build_picture(replace(found, steps=steps))
    assert figure.get_suptitle() == f"{tmp_path.name}: tiny"
    training, held_out = figure.axes
    assert training.get_title() == "training rollouts, sampled"
    assert held_out.get_title() == "held-out tasks"
    assert [axes.get_ylabel() for axes in figure.axes] == ["mean reward"] * 2
    [line] = training.lines
    assert np.asarray(line.get_ydata()).tolist() == [0.25, 0.75]
    assert training.get_legend() is None
    assert [line.get_label() for line in held_out.lines] == [
        "after a step",
        *("base, greedy: 0.00", "trained, greedy: 1.00"),
        *("base, sampled: 0.00", "trained, sampled: 1.00"),
    ]


@pytest.mark.parametrize("evaluated", [True, False])
def test_the_legend_of_the_picture_covers_nothing(tmp_path: Path, evaluated: bool) -> None:
    figure = build_picture(result(tmp_path, evaluated=evaluated))
    figure.draw_without_rendering()
    *_, last = figure.axes
    legend = last.get_legend()
    assert (legend is not None) == evaluated
    if legend is not None:
        box = legend.get_window_extent()
        assert not box.overlaps(last.get_window_extent())
        assert not box.overlaps(last.xaxis.label.get_window_extent())
        assert figure.bbox.y0 <= box.y0
        assert box.x1 <= figure.bbox.x1


def test_progress_without_a_terminal_is_a_line_a_step() -> None:
    text = io.StringIO()
    with Display(Console(file=text, width=100)) as display:
        display.show_phase("evaluate before", 4)
        display.show_step(record(0, 0.25), 2)
        display.show_phase("train", 8)
        display.show_step(record(1, 1.0), 2)
    head, names, first, second = text.getvalue().splitlines()
    assert head == "evaluate before: 4 rollouts"
    assert names.split() == ["step", "reward", "0", "1", "tokens", "seconds", "left"]
    assert names.index("0") == first.index("█")
    assert first.split() == ["1/2", "0.25", "█████", "100", "2.0", "2", "s"]
    assert second.split()[:2] == ["2/2", "1.00"]


@pytest.mark.parametrize("width", [46, 60, 79, 80, 120])
def test_the_line_of_a_step_fits_the_terminal(width: int) -> None:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None)
    more = {f"{EVALUATION}greedy": 0.5, "reward/length": 0.25, "reward/format": 1.0}
    step = record(9, 0.5)
    display = Display(console)
    for rewards in ({}, more):
        display.show_step(step.model_copy(update={"metrics": step.metrics | rewards}), 2000)
    names, first, *rest = (line.rstrip() for line in text.getvalue().splitlines())
    assert max(map(len, (names, first, *rest))) <= width
    assert first.count("█") == min(20, width - 46) // 2
    assert first.split()[-2:] == ["3980", "s"]
    shown = " ".join(" ".join(rest).split())
    assert shown.endswith("3980 s held out 0.50 length 0.25 format 1.00")
    assert len(rest) == 1 or width < 120


def test_a_bar_is_of_rewards_between_0_and_1_and_tells_where_one_is_above() -> None:
    text = io.StringIO()
    display = Display(Console(file=text, width=100))
    for step, reward in enumerate((-2.0, 1.0, 26.0)):
        display.show_step(record(step, reward), 3)
    _, *lines = text.getvalue().splitlines()
    assert [line[18:38] for line in lines] == [" " * 20, "█" * 20, "█" * 19 + "+"]


@pytest.mark.parametrize(("environment", "colored"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_has_colors_unless_the_user_wants_none(
    environment: dict[str, str], colored: bool, tmp_path: Path
) -> None:
    text = io.StringIO()
    terminal = {"TERM": "xterm-256color"} | environment
    console = Console(file=text, width=100, force_terminal=True, _environ=terminal)
    with Display(console) as display:
        display.show_phase("train", 8)
        display.show_step(record(0, 0.25), 2)
        console.print(Text("failed", "bold red"))
    print_report(console, result(tmp_path))
    codes = ";".join(re.findall(r"\x1b\[([0-9;]+)m", text.getvalue())).split(";")
    assert any(code[0] in "349" and len(code) == 2 for code in codes) == colored


def test_a_file_has_no_colors(tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=100, _environ={"TERM": "xterm-256color"})
    with Display(console) as display:
        display.show_step(record(0, 0.25), 2)
        console.print(Text("failed", "bold red"))
    print_report(console, result(tmp_path))
    assert "failed" in text.getvalue()
    assert "\x1b" not in text.getvalue()


def test_quiet_is_silent(tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, quiet=True)
    with Display(console) as display:
        display.show_phase("train", 8)
        display.show_step(record(0, 0.25), 2)
    print_report(console, result(tmp_path))
    assert text.getvalue() == ""


def test_named_rewards_stand_in_the_line_of_a_step() -> None:
    written = io.StringIO()
    step = record(0, 0.5)
    step = step.model_copy(update={"metrics": step.metrics | {"reward/length": 0.25}})
    with Display(Console(file=written, width=120)) as display:
        display.show_step(step, 2)
    assert written.getvalue().rstrip().endswith("  length 0.25")


def test_a_run_that_was_stopped_at_its_start_names_no_run_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "runs" / "mine")
    assert report_stopped("whet demo", folder) == 130
    assert "stopped before it began; start it again" in capsys.readouterr().err
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(RunConfig().model_dump_json())
    assert report_stopped("whet demo", folder) == 130
    assert f"continue with: whet demo --resume mine --dir {tmp_path}" in capsys.readouterr().err
    again = f"whet train --tasks 'a b' --resume mine --dir {tmp_path} -- ./agent --fast"
    assert format_resume("whet train --tasks 'a b' -- ./agent --fast", folder) == again


def test_the_end_of_a_run_names_its_newest_checkpoints_and_the_best(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config_file.write_text(RunConfig().model_dump_json())
    scores = (0.1, 0.9, 0.2, 0.3, 0.4, 0.5)
    steps = [
        StepRecord(
            step=n,
            version=n + 1,
            checkpoint=f"step-{n:06d}",
            consumed=(),
            metrics={f"{EVALUATION}greedy": score},
        )
        for n, score in enumerate(scores)
    ]

    def print_last_lines() -> list[str]:
        text = io.StringIO()
        print_next(Console(file=text, width=80), folder, steps)
        return text.getvalue().splitlines()

    assert [line.split(":")[0] for line in print_last_lines()] == ["run folder", "next"]
    for number in (0, 1, 2, 4, 5):
        (folder.checkpoints / f"step-{number:06d}").mkdir(parents=True)
    _, line, _ = print_last_lines()
    assert line == (
        f"checkpoints in {folder.checkpoints}: step-000001 (after step 2, the best evaluation), "
        "step-000002 (after step 3), step-000004 (after step 5), step-000005 (after step 6) and 1 "
        "older"
    )


def test_output_is_escaped_unless_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    escape_output()
    out.write("a\udcff\u00e9")
    out.flush()
    assert written.getvalue() == b"a\\udcff\\xe9"
    out.close()
    escape_output()


def test_no_line_of_a_run_or_a_log_lets_an_agent_control_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "rollout a failed: \x1b]0;title\x07 \x1b[31m"
    print_line(text)
    print_note(Console(), text)
    StderrHandler().emit(
        logging.LogRecord("whet", logging.WARNING, "", 0, f"{text}\nTraceback", None, None)
    )
    shown = capsys.readouterr()
    assert shown.out == 2 * "rollout a failed: ␛]0;title  ␛[31m\n"
    assert shown.err.splitlines() == ["rollout a failed: ␛]0;title  ␛[31m", "Traceback"]
