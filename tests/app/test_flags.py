import pytest

from whet.app.flags import OneLineParser, add_config_flags, config_values
from whet.config import RunConfig, resolve


def parser() -> OneLineParser:
    made = OneLineParser(prog="whet demo")
    add_config_flags(made)
    return made


def test_a_flag_sets_the_key_of_its_name_and_nothing_else() -> None:
    args = parser().parse_args(["--adam.lr", "1e-3", "--tasks-per-step=4", "--adam.beta1", "0.5"])

    values = config_values(args)

    assert values == {"adam": {"lr": "1e-3", "beta1": "0.5"}, "tasks_per_step": "4"}
    assert resolve(values).adam.lr == 1e-3


def test_every_key_has_a_flag_whose_help_gives_its_default() -> None:
    text = parser().format_help()

    def check(values: dict[str, object], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                check(value, f"{prefix}{key}.")
            else:
                assert f"--{prefix}{key}".replace("_", "-") in text
                assert f"[{value}]" in " ".join(text.split())

    check(RunConfig().model_dump(), "")


def test_no_flags_set_no_keys() -> None:
    assert config_values(parser().parse_args([])) == {}


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
    values = config_values(parser().parse_args(["--gateway.models", "gpt-5,gpt-5-mini"]))
    assert resolve(values).gateway.models == ("gpt-5", "gpt-5-mini")
