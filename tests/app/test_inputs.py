"""Tasks from lists, files and mixes, and the rollouts that are made of them."""

from collections import Counter
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import pytest

from whet.app.inputs import MAX_DEPTH, load_tasks, plan_rollouts
from whet.config import RunConfig, resolve
from whet.errors import ConfigError
from whet.types import FailureKind, Rollout


def test_tasks_come_from_a_list_or_from_a_file_with_one_json_value_a_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"q": 1}\n\n"two"\n3\n')
    assert load_tasks(file) == load_tasks(str(file)) == [{"q": 1}, "two", 3]
    assert load_tasks(["a"]) == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"q": 1}\n{"q": \n', r"line 2 is not JSON .*found '\{\"q\": '"),
        (b"[1, 2]\nNaN\n", r"line 2 is not JSON"),
        (b'1\n{"q": 1e999}\n', r"line 2 is not JSON \(1e999 is too large\)"),
        (b"1\n" + b"[" * 9999 + b"]" * 9999, r"line 2 is not JSON \(maximum recursion"),
        (b"1\n" + b"[" * 300 + b"]" * 300, r"^tasks\[1\] is nested too deeply"),
        (b"\n\n", r"found no tasks in '.*tasks\.jsonl': expected one JSON value a line"),
        (b"", r"found no tasks in '.*tasks\.jsonl'"),
        (b"\xff\xfe\n", "are not UTF-8"),
    ],
)
def test_an_error_in_a_file_names_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_tasks(file)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"on": [1, date(2026, 1, 1)]}, r"^tasks\[1\]\['on'\]\[1\] is of type date: expected"),
        ({"q": {1, 2}}, r"tasks\[1\]\['q'\] is of type set: expected a JSON value"),
        (object(), r"tasks\[1\] is of type object"),
        ({"q": float("nan")}, r"tasks\[1\]\['q'\] is nan: expected a finite number"),
        ({"q": {1: 2}}, r"tasks\[1\]\['q'\] has the key 1: expected keys that are str, as in JSON"),
    ],
)
def test_a_task_that_is_not_json_is_named(task: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tasks(["a", task])


def test_tuples_and_files_with_a_byte_order_mark_are_tasks(tmp_path: Path) -> None:
    assert load_tasks(list(zip("ab", [(1,), 2], strict=True))) == [["a", [1]], ["b", 2]]
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"q": 1}\n', encoding="utf-8-sig")
    assert load_tasks(file) == [{"q": 1}]


def test_the_deepest_task_survives_the_store() -> None:
    task: Any = "x"
    for _ in range(MAX_DEPTH):
        task = [task]
    rollout = Rollout(id="r", group="g", task=load_tasks([task])[0])
    assert Rollout.model_validate_json(rollout.model_dump_json()) == rollout
    with pytest.raises(ConfigError, match=r"tasks\[0\] is nested too deeply"):
        load_tasks([[task]])


def test_a_task_that_contains_itself_is_refused() -> None:
    task: list[object] = []
    task.append(task)
    with pytest.raises(ConfigError, match=r"tasks\[0\] is nested too deeply, or contains"):
        load_tasks(cast(Any, [task]))


def test_a_mapping_is_not_taken_for_the_list_of_its_keys() -> None:
    splits: Any = {"train": ["a"], "test": ["b"]}
    with pytest.raises(ConfigError, match="tasks is a mapping with the keys 'train', 'test'"):
        load_tasks(splits)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the tasks 'no\.jsonl'"):
        load_tasks("no.jsonl")
    with pytest.raises(ConfigError, match="found no tasks: expected at least one"):
        load_tasks([])


def config(**values: object) -> RunConfig:
    return resolve({"tasks_per_step": 2, "group_size": 3, **values})  # pyright: ignore


def test_every_task_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    tasks = list(range(10))
    plan = plan_rollouts(tasks, config())

    epochs = [[plan(n)[0].task for n in range(10 * e, 10 * e + 10)] for e in (0, 1)]

    assert [sorted(epoch) for epoch in epochs] == [tasks, tasks]  # pyright: ignore
    assert epochs[0] != epochs[1]


def test_a_group_asks_for_the_same_rollouts_by_the_same_ids_every_time() -> None:
    tasks = list(range(10))
    assert plan_rollouts(tasks, config())(3) == plan_rollouts(tasks, config())(3)
    assert plan_rollouts(tasks, config())(3) != plan_rollouts(tasks, config(seed=1))(3)


def test_no_two_rollouts_of_a_run_share_an_id_and_groups_are_of_one_task() -> None:
    plan = plan_rollouts(["a", "b", "c"], config())
    rollouts = [rollout for group in range(8) for rollout in plan(group)]

    assert len({rollout.id for rollout in rollouts}) == len(rollouts) == 4 * 2 * 3
    groups: dict[str, list[object]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout.task)
    assert all(len(g) == 3 and len(set(g)) == 1 for g in groups.values())


def test_the_limits_of_the_config_reach_every_rollout() -> None:
    runner = {"timeout_s": 5, "max_attempts": 4, "temperature": 0.5}
    (rollout, *_) = plan_rollouts(["a"], config(runner=runner))(0)
    assert rollout.timeout_s == 5
    assert rollout.max_attempts == 4
    assert rollout.sampling.temperature == 0.5


def test_a_failure_that_has_a_reward_is_not_tried_again() -> None:
    [first, *_] = plan_rollouts(["a"], config())(0)
    [other, *_] = plan_rollouts(["a"], config(failure_reward={"agent": 0, "timeout": -1}))(0)
    assert set(first.retried) - set(other.retried) == {FailureKind.AGENT}
    assert FailureKind.WORKER_LOST in other.retried


def planned(groups: int, tasks: list[Any], rewards: list[float | None], **values: object) -> Any:
    plan = plan_rollouts(tasks, config(**values), group_rewards=rewards)
    return [plan(number)[0].task for number in range(groups)]


def test_files_of_a_mix_get_their_shares_of_every_step(tmp_path: Path) -> None:
    many, few = tmp_path / "many=1.jsonl", tmp_path / "few.jsonl"
    many.write_text("\n".join(f'"a{n}"' for n in range(50)))
    few.write_text('"b0"\n"b1"')
    mix = load_tasks(f"{many}=3,{few}=1")
    assert len(mix) == 52
    found = planned(40, mix, [])
    assert all([t[0] for t in found[at : at + 4]].count("b") == 1 for at in range(0, 40, 4))
    assert sorted(t for t in found if t[0] == "b") == ["b0"] * 5 + ["b1"] * 5
    assert len({t for t in found if t[0] == "a"}) == 30, "every task once before one comes again"
    assert load_tasks(str(few)) == ["b0", "b1"]


@pytest.mark.parametrize("source", ["a.jsonl=x", "a.jsonl=0", "a.jsonl=1,b.jsonl", "=1", "a=inf"])
def test_a_mix_without_a_share_is_explained(source: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a file and its share|cannot read"):
        load_tasks(source)


EASY, HARD = {0, 1, 2}, {3, 4, 5}


def reward_of(task: int) -> float:
    return 1.0 if task in EASY else 0.0 if task in HARD else 0.5


def run_curriculum(
    groups: int, step: int, **values: object
) -> tuple[list[int], list[float | None]]:
    """Plan step by step, as a run does, with the rewards of the steps before."""
    rewards: list[float | None] = []
    plan = plan_rollouts(list(range(12)), config(**values), group_rewards=rewards)
    found: list[int] = []
    while len(found) < groups:
        new = [cast(int, plan(len(found) + n)[0].task) for n in range(step)]
        found += new
        rewards += [reward_of(task) for task in new]
    return found, rewards


def test_solved_and_unsolved_tasks_come_less_often() -> None:
    found, _ = run_curriculum(600, 2, curriculum={"solved_weight": 0.25, "unsolved_weight": 0.0})
    count = Counter(found)
    assert all(count[task] == 1 for task in HARD), "once, and then never again"
    middle = fmean(count[task] for task in set(range(12)) - EASY - HARD)
    assert 0.15 < fmean(count[task] for task in EASY) / middle < 0.35
    assert run_curriculum(24, 2)[0] == planned(24, list(range(12)), []), "off by default"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"algorithm": {"oversample": 3}},
        {"loop": {"name": "overlapped", "max_staleness": 2}},
        {"seed": 5},
    ],
)
def test_a_resumed_curriculum_plans_the_same_tasks(values: dict[str, object]) -> None:
    values = {**values, "curriculum": {"solved_weight": 0.2, "unsolved_weight": 0.1}}
    found, rewards = run_curriculum(60, 2, **values)
    assert planned(60, list(range(12)), rewards, **values) == found


def test_a_curriculum_without_rewards_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the rewards of earlier groups"):
        plan_rollouts(["a"], config(curriculum={"solved_weight": 0.5}))
