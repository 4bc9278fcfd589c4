"""Flags of commands: each sets one config key, and a bad one is an error in one line."""

import shlex
from pathlib import Path

import pytest

from whet.app.cli.config_flags import (
    add_config_flags,
    format_config_help,
    list_config_fields,
    read_config_values,
)
from whet.app.cli.eval import KEPT
from whet.app.cli.flags import (
    CommandParser,
    add_resume_flag,
    format_command,
    name_resumed_run,
)
from whet.app.cli.main import build_parser
from whet.app.run_folder import RunFolder
from whet.config import RunConfig, resolve


def parser() -> CommandParser:
    made = CommandParser(prog="whet demo")
    add_config_flags(made, {"training": ("steps",)})
    return made


def test_a_flag_sets_the_key_of_its_name_and_nothing_else() -> None:
    args = parser().parse_args(["--adam.lr", "1e-3", "--tasks-per-step=4", "--adam.beta2", "0.5"])

    values = read_config_values(args)

    assert values == {"adam": {"lr": "1e-3", "beta2": "0.5"}, "tasks_per_step": "4"}
    assert resolve(values).adam.lr == 1e-3


def test_every_key_has_a_flag_that_help_hides_unless_it_is_shown() -> None:
    made = parser()
    for key, _ in list_config_fields():
        if key.startswith("supervised."):
            continue  # of `whet sft` and `whet dpo`
        flag = f"--{key.replace('_', '-')}"
        assert read_config_values(made.parse_args([flag, "x"])), flag
    text = made.format_help()
    assert "--steps N" in text
    assert "--adam.beta2" not in text


def test_no_flags_set_no_keys() -> None:
    assert read_config_values(parser().parse_args([])) == {}


@pytest.mark.parametrize("line", ["--stepz 3", "--adam.learning-rate 1", "--steps"])
def test_a_bad_flag_is_one_line_and_exit_code_2(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(line.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_flag_cannot_be_shortened() -> None:
    # `--step 3` would change its meaning the day a key `step_size` is added.
    with pytest.raises(SystemExit):
        parser().parse_args(["--step", "3"])


def test_a_list_is_given_with_commas() -> None:
    values = read_config_values(parser().parse_args(["--gateway.models", "gpt-5,gpt-5-mini"]))
    assert resolve(values).gateway.models == ("gpt-5", "gpt-5-mini")


def test_the_kind_of_an_engine_or_trainer_has_a_short_flag() -> None:
    args = parser().parse_args(
        ["--engine", "vllm", "--engine.urls", "http://a", "--trainer.kind=local"]
    )
    assert resolve(read_config_values(args)).engine.kind == "vllm"
    text = format_config_help(dict(list_config_fields()))
    assert "`vllm`, `sglang`: Running servers" in " ".join(text.split())


def test_the_command_that_continues_an_evaluation_names_the_variable_with_the_key() -> None:
    arguments = ["eval", "a.py:f", "--tasks", "t.jsonl", "--endpoint", "http://x", "--model", "m"]
    for flags in ([], ["--key-variable", "MY_KEY"]):
        args = build_parser().parse_args([*arguments, *flags])
        continues = shlex.join(["whet", "eval", "a.py:f", "--tasks", "t.jsonl", *flags])
        assert format_command("eval", args, KEPT) == continues


def test_a_run_is_resumed_by_its_name_or_its_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(RunConfig(dir=tmp_path, name="mine"), "train").path
    made = CommandParser(prog="whet train")
    add_resume_flag(made, "a run")

    def resume(*flags: str) -> object:
        return name_resumed_run(made.parse_args(flags), {"steps": "3"})

    assert resume("--resume", "mine") == {"steps": "3", "name": "mine"}
    assert resume("--resume", str(folder)) == {"steps": "3", "name": "mine", "dir": str(tmp_path)}
    assert resume("--resume") == resume() == {"steps": "3"}
