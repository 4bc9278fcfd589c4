"""What `whet doctor` says of a template."""

import argparse
import json
from pathlib import Path

import pytest

from whet.app.cli import build_parser
from whet.app.doctor import run_doctor, template_verdict
from whet.errors import ConfigError
from whet.policies.catalogue import TINY

COUNTING = (
    "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def args_of(*, as_json: bool = False, **named: str) -> argparse.Namespace:
    flags = [part for name, value in named.items() for part in (f"--{name}", value)]
    return build_parser().parse_args(["doctor", *flags, *(["--json"] if as_json else [])])


def test_a_model_gets_its_verdict() -> None:
    verdict = template_verdict(TINY)
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
    assert "mode            merged" in out
    assert "tools           yes" in out
    assert "two turns" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (args_of(), "say what to look at"),
        (args_of(template="x.jinja"), "needs a tokenizer"),
        (args_of(template="x.jinja", tokenizer=str(TINY)), "no template file"),
    ],
)
def test_what_is_missing_is_said(args: argparse.Namespace, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_doctor(args)


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
    {"run": "r", "body": {"prompt": "no chat"}, "reply": {}},
]


def test_recorded_traffic_is_told_what_rendering_it_again_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in TRAFFIC))
    run_doctor(args_of(traffic=str(file), model=str(TINY), as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert (found["calls"], found["skipped"]) == (2, 1)
    assert (found["turns_back"], found["matched"], found["turns_drifted"]) == (1, 1, 1)
    assert found["tokens_drifted"] > 0


def test_traffic_that_is_not_json_is_told_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text("{}\nnonsense\n")
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        run_doctor(args_of(traffic=str(file), model=str(TINY)))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run"):
        run_doctor(args_of(run=str(tmp_path)))
