"""The user's own algorithm: found by name or given as an object, and refused where it cannot be."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import whet
from support.store.trajectories import single
from whet.app.composition.trainers import (
    check_credit,
    load_loss,
    name_algorithm,
    open_algorithm,
)
from whet.config import resolve
from whet.errors import ConfigError
from whet.types import Credit, Group, StepRecord

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "custom_algorithm" / "train.py"
TINY = Path(whet.__file__).parent / "demos" / "tiny"


class Mine:
    """As small as they get."""

    async def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        return []


class Blocking:
    """Forgot to be async."""

    def credit(self, groups: Sequence[Group], past: Sequence[StepRecord]) -> list[Credit]:
        return []


class OldFashioned:
    """Takes one group."""

    async def credit(self, group: Group) -> list[Credit]:
        return []


class Demanding(Mine):
    """Cannot be made from its name."""

    def __init__(self, temper: float) -> None:
        self.temper = temper


def opened(name: str) -> object:
    config = resolve({"algorithm": {"name": name}})
    return open_algorithm(config, TINY, progress=lambda text: None)


@pytest.mark.anyio
async def test_the_example_gives_credit_beyond_the_median_in_fewer_than_40_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
    algorithm = check_credit(opened(f"{EXAMPLE}:AboveMedian"))
    group = [single(f"r{i}", [1], [2], reward) for i, reward in enumerate((0.0, 1.0, 5.0))]
    equal = [single(f"e{i}", [1], [2], 1.0) for i in range(2)]
    credits = await algorithm.credit([group, equal], [])
    assert [list(c.advantages.values()) for c in credits] == [[-1.0], [0.0], [4.0]]


def test_an_object_is_named_so_that_a_resumed_run_can_make_another() -> None:
    assert type(opened(name_algorithm(Mine()))) is Mine


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Mine", "cannot import the algorithm 'nowhere:Mine'"),
        (f"{EXAMPLE}:Other", "has no 'Other'"),
        (f"{__name__}:Blocking", "`async def credit.*'Blocking' has none"),
        (f"{__name__}:OldFashioned", r"credit takes \(groups, past\); that of 'OldFashioned'"),
        (f"{__name__}:Demanding", "cannot make the algorithm .*'temper'"),
    ],
)
def test_an_invalid_algorithm_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(name)


def test_a_class_instead_of_an_object_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="credit takes"):
        whet.train(lambda task, llm: 0.0, ["a"], algorithm=Mine)  # pyright: ignore


def test_a_teacher_with_another_tokenizer_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((TINY / "config.json").read_text())
    (other / "model.safetensors").write_bytes(b"")
    (other / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    config = resolve({"algorithm": {"name": "distillation", "teacher": str(other)}})
    with pytest.raises(ConfigError, match="has another tokenizer than 'tiny'"):
        open_algorithm(config, TINY, progress=lambda text: None)


@pytest.mark.slow
def test_the_example_runs_as_it_is(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [config] = tmp_path.glob(".whet/runs/*/config.json")
    assert "__main__:AboveMedian" in config.read_text()


def my_loss(logp: object, ratio: object, batch: object, config: object) -> object:
    return logp


def two_arguments(logp: object, ratio: object) -> object:
    return logp


def test_a_loss_is_found_by_name_and_refused_where_it_is_none() -> None:
    assert load_loss(f"{__name__}:my_loss") is my_loss
    for name, message in [
        ("nowhere:loss", "cannot import the loss 'nowhere:loss'"),
        (f"{__name__}:ROOT", "is not a function"),
        (f"{__name__}:two_arguments", r"takes \(logp, ratio, batch, config\)"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_loss(name)
    with pytest.raises(ConfigError, match=r"'my.py:loss' needs trainer.kind 'local'"):
        resolve({"loss": {"name": "my.py:loss"}, "trainer": {"kind": "tinker"}})
