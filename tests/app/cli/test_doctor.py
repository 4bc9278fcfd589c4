"""Reports of `whet doctor` on templates, traffic and runs."""

import argparse
import json
import math
from pathlib import Path

import anyio
import pytest

from support.models.real_templates import template_of, trl_templates
from whet.app.cli.doctor import check_template, run_doctor
from whet.app.cli.main import build_parser
from whet.app.run_folder import RunFolder
from whet.config import RunConfig
from whet.errors import ConfigError
from whet.models.catalog import TINY
from whet.store.sqlite import SQLiteStore
from whet.types import Failure, FailureKind, Outcome, Rollout

COUNTING = (
    "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def args_of(*, as_json: bool = False, **named: str) -> argparse.Namespace:
    flags = [part for name, value in named.items() for part in (f"--{name}", value)]
    return build_parser().parse_args(["doctor", *flags, *(["--json"] if as_json else [])])


def test_a_run_without_its_flag_is_told_from_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder.create(RunConfig(name="mine"), "train")
    for name, meant in (("mine", "--run mine"), (".whet/runs/mine", "--run .wh"), ("a", "--model")):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["doctor", name])
        assert f"did you mean {meant}" in capsys.readouterr().err


def test_a_model_gets_its_verdict() -> None:
    verdict = check_template(TINY)
    assert verdict["mode"] == "merged"
    assert verdict["causes"] == []
    assert verdict["tools"] is True


def test_a_template_file_gets_its_verdict_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "counting.jinja"
    file.write_text(COUNTING)
    assert run_doctor(args_of(template=str(file), tokenizer=str(TINY), as_json=True)) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["mode"] == "per-call"
    assert "two turns" in verdict["probes"]["failed"]
    assert verdict["causes"]


def test_a_reader_gets_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(args_of(model="tiny")) == 0
    out = capsys.readouterr().out
    assert "conversations     merged: 18 of 18 kinds train as one row" in out
    assert "tools             calls are read in the format 'hermes'" in out
    assert "thinking          none" in out
    assert "left out          name of a message; calls are marked" in out
    assert "two turns; system message" in out


QWEN = trl_templates()["qwen3"]


def test_a_cause_has_the_line_of_the_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "thinking.jinja"
    file.write_text(QWEN)
    tokenizer = tmp_path / "model"
    template_of(tokenizer, "qwen3", QWEN)
    assert run_doctor(args_of(template=str(file), tokenizer=str(tokenizer))) == 0
    out = capsys.readouterr().out
    assert "conversations     merged: 19 of 23 kinds train as one row" in out
    assert "thinking          read in the format 'think' and read back" in out
    forks = out.partition("A new row")[2]
    number = 1 + next(i for i, line in enumerate(QWEN.splitlines()) if "'\\n<think>\\n'" in line)
    assert "the turn's own thinking is left out" in forks
    assert f"line {number}: {{{{- '<|im_start|>' + message.role" in forks


def test_tools_in_an_unknown_format_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "unknown.jinja"
    file.write_text("{{ tools | tojson if tools }}" + COUNTING)
    assert run_doctor(args_of(template=str(file), tokenizer=str(TINY))) == 0
    assert "refused: calls in this format" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (args_of(), "nothing to check"),
        (args_of(template="x.jinja"), "needs --tokenizer"),
        (args_of(template="x.jinja", tokenizer=str(TINY)), "no template file"),
        (args_of(run="x", model="tiny"), "found --run and --model: leave one out"),
        (args_of(run="x", traffic="x"), "found --run and --traffic"),
        (args_of(traffic="x", model="tiny", template="y"), "found --traffic and --template"),
        (args_of(tokenizer=str(TINY), model="tiny"), "found --tokenizer and --model"),
    ],
)
def test_missing_or_wrong_arguments_are_reported(args: argparse.Namespace, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_doctor(args)


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jinja").write_bytes(b"\xff")
    with pytest.raises(
        ConfigError, match=r"cannot read the template .*x\.jinja': UnicodeDecodeErr"
    ):
        check_template(TINY, tmp_path / "x.jinja")


def test_a_template_for_tools_alone_is_named_as_such(tmp_path: Path) -> None:
    file = tmp_path / "tool_use.jinja"
    file.write_text("{% for tool in tools %}{{ tool }}{% endfor %}" + COUNTING)
    with pytest.raises(ConfigError, match=r"no conversation without tools.*tool_use\.jinja"):
        run_doctor(args_of(template=str(file), tokenizer=str(TINY)))


TRAFFIC = [
    {
        "run": "r",
        "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        "reply": {
            "choices": [
                {
                    "message": {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "function",
                                "function": {"name": "f", "arguments": '{"a":  1}'},
                            }
                        ],
                    }
                }
            ]
        },
    },
    {
        "run": "r",
        "body": {
            "model": "m",
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": 1}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ],
        },
        "reply": {"choices": []},
    },
    {"run": "r", "body": {"prompt": "no chat"}, "reply": {"logprob": -math.inf}},
]


def test_a_report_on_recorded_traffic_lists_what_rendering_it_again_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in TRAFFIC))
    run_doctor(args_of(traffic=str(file), model=str(TINY), as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert (found["calls"], found["skipped"]) == (2, 1)
    assert (found["turns_back"], found["matched"], found["turns_drifted"]) == (1, 1, 1)
    assert found["tokens_drifted"] > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_in_recorded_traffic_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], streamed: bool
) -> None:
    hi, turn = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "5"}
    whole = {"choices": [{"message": turn | {"reasoning_content": "hm, hm"}}]}
    thoughts = [{"reasoning": "hm, "}, {"reasoning": "hm"}, {"content": "5"}]
    chunks = [{"choices": [{"delta": delta}]} for delta in thoughts]
    first = {"body": {"model": "m", "messages": [hi]}, "reply": chunks if streamed else whole}
    echo = turn | {"reasoning": "hm, hm"}
    second = {"body": {"model": "m", "messages": [hi, echo, hi]}, "reply": {"choices": []}}
    file = tmp_path / "traffic.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in (first, second)))
    run_doctor(args_of(traffic=str(file), model=str(TINY), as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert (found["turns_back"], found["matched"]) == (1, 1)


def test_traffic_that_is_not_json_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text("{}\nnonsense\n")
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        run_doctor(args_of(traffic=str(file), model=str(TINY)))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        run_doctor(args_of(run=str(tmp_path)))


def test_a_run_of_several_processes_is_found_in_the_store_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WHET_STORE", raising=False)
    folder = RunFolder.create(RunConfig(name="mine"), "train")
    with pytest.raises(ConfigError, match="on this machine: name their store, or set"):
        run_doctor(args_of(run="mine"))

    async def fill(run: str, rollouts: int) -> None:
        async with SQLiteStore(tmp_path / ".whet" / "store.db", run=run) as store:
            for number in range(rollouts):
                await store.enqueue([Rollout(id=f"{number}", task=None, group="g")])
                attempt = await store.claim("w", lease_s=60, wait_s=0)
                assert attempt is not None
                await store.finish(attempt.id, Outcome(reward=1.0))

    anyio.run(fill, "mine", 2)
    anyio.run(fill, "another", 3)
    for named in ("mine", ".whet/runs/mine", str(folder.path)):
        run_doctor(args_of(run=named, as_json=True))
        assert json.loads(capsys.readouterr().out)["rollouts"] == 2
    assert not folder.store.exists()


def test_a_run_in_which_all_failed_is_told_from_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(RunConfig(name="mine", dir=tmp_path), "train")
    reasons = ("KeyError: 'a'", "KeyError: 'a'", "timeout")

    async def fill() -> None:
        async with SQLiteStore(folder.store) as store:
            for number, reason in enumerate(reasons):
                await store.enqueue([Rollout(id=f"{number}", task=None, group="g", max_attempts=1)])
                attempt = await store.claim("w", lease_s=60, wait_s=0)
                assert attempt is not None
                failure = Failure(kind=FailureKind.AGENT, message=reason)
                await store.finish(attempt.id, Outcome(failure=failure))

    anyio.run(fill)
    run_doctor(args_of(run=str(folder.path)))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "verdict nothing was trained: 3 rollouts failed, and none succeeded" in lines
    place = lines.index("failures")
    assert lines[place - 1] == "failed rollouts 3"
    assert lines[place + 1 : place + 3] == ["agent: KeyError: 'a' 2", "agent: timeout 1"]
    assert {"calls per row -", "forks -", "logprob gap -"} <= {*lines}
