"""What `whet doctor` says of a template."""

import argparse
import json
from pathlib import Path

import pytest

from whet.app.doctor import run_doctor, template_verdict
from whet.errors import ConfigError
from whet.policies.catalogue import TINY

COUNTING = (
    "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def args_of(
    *, model: str = "", template: str = "", tokenizer: str = "", as_json: bool = False
) -> argparse.Namespace:
    return argparse.Namespace(model=model, template=template, tokenizer=tokenizer, json=as_json)


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
