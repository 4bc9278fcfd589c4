"""The actor that keeps a runner alive, without Ray; integrations/ray_runners has a cluster."""

import threading
from pathlib import Path

import pytest

from whet.app.cli.main import main
from whet.errors import ConfigError
from whet.io.process import find_free_port
from whet.runners.ray_pool import RunnerActor, connect_ray

pytestmark = pytest.mark.anyio


def test_a_runner_that_cannot_run_is_not_restarted(tmp_path: Path) -> None:
    actor = RunnerActor(["no_such_module:agent"], {}, str(tmp_path))
    assert actor.run() == 2


def test_a_stopped_actor_starts_no_process(tmp_path: Path) -> None:
    actor = RunnerActor(["no_such_module:agent"], {}, str(tmp_path))
    actor.stop()
    assert actor.run() == 0


def test_a_stop_drains_the_process(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def work(task):\n    return 1.0\n")
    # Without a token it waits for one, which a stop ends.
    arguments = ["agent.py:work", "--gateway=none", "--dir", str(tmp_path)]
    actor = RunnerActor(arguments, {"WHET_STORE_TOKEN": ""}, str(tmp_path))
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(actor.run()))
    thread.start()
    while actor._process is None and thread.is_alive():
        thread.join(0.05)
    actor.stop()
    thread.join(120)
    assert ended == [0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a.py:b", "--num=2"], "--num is for runners on a Ray cluster: add --ray auto"),
        (["a.py:b", "--cpus=2"], "--cpus is for runners on a Ray cluster"),
        (["a.py:b", "--scale=2"], "leave out --ray and AGENT"),
        (["a.py:b", "--ray=auto", "--num=-1"], "invalid --num -1: expected 0 or more"),
        (["a.py:b", "--ray=auto", "--cpus=0"], "invalid --cpus 0: expected more than 0"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runner", *arguments]) == 2
    assert reason in capsys.readouterr().err


async def test_a_cluster_that_does_not_answer_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no Ray cluster at '127"):
        async with connect_ray(f"127.0.0.1:{find_free_port()}"):
            pass


def test_a_trainer_takes_ray_by_its_name() -> None:
    import whet

    trainer = whet.Trainer(runner="ray", n_workers=4)
    assert trainer._settings["runner"] == {"ray": "auto", "concurrency": 4}
    with pytest.raises(ConfigError, match="expected 'ray', or keys of the section"):
        whet.Trainer(runner="slurm")
    with pytest.raises(ConfigError, match="import an agent by its name"):
        trainer.fit(lambda task: 1.0, ["a"])
