from pathlib import Path

import pytest

from whet.app.tasks import load_tasks, training_plan
from whet.config import RunConfig, resolve
from whet.errors import ConfigError


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
        (b"\n\n", "there are no tasks"),
        (b"\xff\xfe\n", "are not UTF-8"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_tasks(file)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the tasks 'no\.jsonl'"):
        load_tasks("no.jsonl")
    with pytest.raises(ConfigError, match="there are no tasks"):
        load_tasks([])


def config(**values: object) -> RunConfig:
    return resolve({"tasks_per_step": 2, "group_size": 3, **values})  # pyright: ignore


def test_every_task_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    tasks = list(range(10))
    plan = training_plan(tasks, config())

    epochs = [[plan(n)[0].task for n in range(10 * e, 10 * e + 10)] for e in (0, 1)]

    assert [sorted(epoch) for epoch in epochs] == [tasks, tasks]  # pyright: ignore
    assert epochs[0] != epochs[1]


def test_a_group_asks_for_the_same_rollouts_by_the_same_ids_every_time() -> None:
    tasks = list(range(10))
    assert training_plan(tasks, config())(3) == training_plan(tasks, config())(3)
    assert training_plan(tasks, config())(3) != training_plan(tasks, config(seed=1))(3)


def test_no_two_rollouts_of_a_run_share_an_id_and_groups_are_of_one_task() -> None:
    plan = training_plan(["a", "b", "c"], config())
    rollouts = [rollout for group in range(8) for rollout in plan(group)]

    assert len({rollout.id for rollout in rollouts}) == len(rollouts) == 4 * 2 * 3
    groups: dict[str, list[object]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout.task)
    assert all(len(g) == 3 and len(set(g)) == 1 for g in groups.values())


def test_the_limits_of_the_config_reach_every_rollout() -> None:
    runner = {"timeout_s": 5, "max_attempts": 4, "temperature": 0.5}
    (rollout, *_) = training_plan(["a"], config(runner=runner))(0)
    assert rollout.timeout_s == 5
    assert rollout.max_attempts == 4
    assert rollout.sampling.temperature == 0.5
