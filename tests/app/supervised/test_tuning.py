"""`whet sft` and `whet dpo` as users start them: files, rollouts of a run, resuming, refusals."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import whet
from support.runs.commands import environment
from whet.app.cli.main import main
from whet.app.run_folder import RunFolder
from whet.app.supervised.tuning import FineTuning
from whet.errors import ConfigError
from whet.models.catalog import TINY
from whet.types import Endpoint

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIALOGUES = [
    {
        "messages": [
            {"role": "user", "content": f"Say {word}."},
            {"role": "assistant", "content": f"I say {word}."},
        ]
    }
    for word in WORDS
]
PAIRS = [
    {"prompt": f"Say {word}.", "chosen": f"I say {word}.", "rejected": f"Never say {word}."}
    for word in WORDS
]
FULL: dict[str, Any] = {"trainer": {"weights": "full"}, "adam": {"lr": 1e-3}}


def settings(directory: Path, name: str, **supervised: Any) -> dict[str, Any]:
    values = {"batch_size": 4, "epochs": 4, "checkpoint_every": 3, "held_out": 0.2} | supervised
    return {"dir": str(directory), "name": name, "supervised": values, **FULL}


def with_name(values: dict[str, Any], name: str) -> dict[str, Any]:
    return values | {"name": name}


def weights(folder: Path) -> dict[str, list[float]]:
    [file] = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name).flatten().tolist() for name in opened.keys()}  # noqa: SIM118


def test_dialogues_are_learned_and_the_model_is_a_start_for_training(tmp_path: Path) -> None:
    result = whet.sft(DIALOGUES, quiet=True, **settings(tmp_path, "warm"))
    assert result.after["loss"] < 0.7 * result.before["loss"]
    assert [step.version for step in result.steps] == [3, 6, 8]
    saved = json.loads((result.run / "report.json").read_text())
    assert saved["after"] == result.after
    assert saved["steps"] == RunFolder(result.run).read_config().steps == 8
    preferred = whet.dpo(
        PAIRS, quiet=True, model=str(result.model), **settings(tmp_path, "liked", beta=0.2)
    )
    assert preferred.before["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert preferred.after["loss"] < 0.5
    assert preferred.after["accuracy"] == 1.0


@pytest.mark.slow
def test_an_adapter_is_trained_by_default(tmp_path: Path) -> None:
    values: dict[str, Any] = {**settings(tmp_path, "warm"), "trainer": {}}
    result = whet.sft(DIALOGUES, held_out=DIALOGUES[:2], quiet=True, **values)
    assert result.after["loss"] < result.before["loss"]
    assert (result.model / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_killed_run_continues_to_the_same_weights(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    data = DIALOGUES if kind == "sft" else PAIRS
    file.write_text("".join(json.dumps(each) + "\n" for each in data))
    flags = ["--dir", str(tmp_path), "--trainer.weights", "full", "--batch-size", "2"]
    flags += ["--epochs", "4", "--supervised.checkpoint-every", "2", "--adam.lr", "1e-3"]

    def command(name: str) -> list[str]:
        return [sys.executable, "-m", "whet", kind, str(file), "--name", name, *flags]

    subprocess.run(command("whole"), env=environment(), check=True, stdout=subprocess.DEVNULL)
    killed = subprocess.Popen(command("killed"), env=environment(), stdout=subprocess.DEVNULL)
    checkpoints = tmp_path / "runs" / "killed" / "checkpoints"
    deadline = time.monotonic() + 60
    while not (checkpoints.is_dir() and any(p.name[0] != "." for p in checkpoints.iterdir())):
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "runs" / "killed" / "model").exists()
    assert main([kind, str(file), "--resume", "killed", "--dir", str(tmp_path), "--quiet"]) == 0
    assert weights(tmp_path / "runs/killed/model") == weights(tmp_path / "runs/whole/model")


def test_a_resumed_run_keeps_its_data(tmp_path: Path) -> None:
    whet.sft(DIALOGUES, quiet=True, **settings(tmp_path, "warm", epochs=1))
    with pytest.raises(ConfigError, match="examples are not those the run 'warm' was started with"):
        whet.sft(DIALOGUES[1:], quiet=True, resume=True, dir=str(tmp_path), name="warm")


async def say(task: str, llm: Endpoint) -> float:
    """Earn more for longer answers."""
    import openai

    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        reply = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task}], max_tokens=12
        )
    return len(reply.choices[0].message.content or "") / 50


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rl")
    tasks = [f"Say {word}." for word in WORDS[:4]]
    result = whet.train(
        say, tasks, steps=1, tasks_per_step=4, group_size=4, dir=str(directory), name="rl",
        quiet=True, **FULL,
    )  # fmt: skip
    return result.run


@pytest.mark.slow
def test_the_best_rollouts_of_a_run_are_imitated(run: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = settings(tmp_path, "best", held_out=0, epochs=3, checkpoint_every=1)
    values["adam"] = {"lr": 1e-4}  # answers that the model sampled leave little to learn
    best = whet.sft(from_run=run, quiet=True, **values)
    assert best.steps[-1].version == 3  # at most one of each of the 4 groups: a batch an epoch
    assert best.steps[-1].metrics["loss"] < best.steps[0].metrics["loss"]
    every = whet.sft(from_run=run, min_reward=0.0, quiet=True, **with_name(values, "every"))
    assert total_tokens(every) > total_tokens(best)
    with pytest.raises(ConfigError, match="none of the run's 4 groups of training rollouts"):
        whet.sft(from_run=run, min_reward=99.0, quiet=True, **with_name(values, "none"))
    assert not (tmp_path / "runs" / "none").exists()


def total_tokens(result: FineTuning) -> float:
    return sum(step.metrics["trained_tokens"] for step in result.steps)


@pytest.mark.slow
def test_best_and_worst_of_a_group_are_a_pair(run: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = settings(tmp_path, "pairs", held_out=0, epochs=3)
    result = whet.dpo(from_run=run, quiet=True, **values)
    assert result.steps[-1].version == 3
    assert result.steps[-1].metrics["loss"] < 0.6931
    with pytest.raises(ConfigError, match="none of the run's 4 groups"):
        whet.dpo(from_run=run, min_margin=50.0, quiet=True, **with_name(values, "none"))


@pytest.mark.slow
def test_a_resumed_run_keeps_the_model_that_replaced_that_of_the_rollouts(
    run: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(TINY, tmp_path / "other")
    values = settings(tmp_path, "best", held_out=0)
    first = whet.sft(from_run=run, quiet=True, model=str(other), **values)
    again = whet.sft(from_run=run, quiet=True, resume=True, **values)
    assert again.steps == first.steps
    assert RunFolder(again.run).read_config().model == str(other)


def test_a_run_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    damaged = shutil.copytree(TINY, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="damaged"):
        whet.sft(DIALOGUES, quiet=True, model=str(damaged), **settings(tmp_path, "warm"))
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sft", "give a file of dialogues or --from RUN"),
        ("sft x.jsonl --from y", "give a file of dialogues or --from RUN"),
        ("sft x.jsonl", "cannot read the dialogues 'x.jsonl'"),
        ("sft --from nowhere", "there is no run 'nowhere'"),
        ("sft --from nowhere --best 0", "expected the best 1 or more of a group, found 0"),
        ("sft x.jsonl --min-reward 1", "are for --from: leave them out"),
        ("dpo x.jsonl --min-margin 1", "are for --from: leave them out"),
        ("sft x.jsonl --supervised.beta 1", "'supervised.beta' has no meaning for sft"),
        ("sft x.jsonl --trainer.kind tinker", "sft trains in this process"),
        ("sft x.jsonl --steps 5", "unknown flag --steps"),
        ("dpo x.jsonl --min-reward 1", "unknown flag --min-reward"),
    ],
)
def test_an_impossible_request_is_an_error_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        code = main([*arguments.split(), "--dir", str(tmp_path)])
    except SystemExit as error:
        code = error.code
    errors = capsys.readouterr().err
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_keys_of_reinforcement_learning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'group_size' has no meaning for sft"):
        whet.sft(DIALOGUES, quiet=True, dir=str(tmp_path), group_size=4)
    with pytest.raises(ConfigError, match="'supervised' is for sft and dpo"):
        whet.train(say, ["x"], quiet=True, dir=str(tmp_path), supervised={"epochs": 2})


@pytest.mark.slow
def test_dialogues_longer_than_the_context_are_refused_or_left_out(tmp_path: Path) -> None:
    long = {"prompt": "Say it.", "completion": "word " * 3000}
    values = settings(tmp_path, "long", epochs=1)
    with pytest.raises(ConfigError, match=r"dialogue 11: 9,.* tokens do not fit .*1 such"):
        whet.sft([*DIALOGUES, long], quiet=True, **values)
    result = whet.sft([*DIALOGUES, long], quiet=True, **settings(tmp_path, "short", skip_long=True))
    assert RunFolder(result.run).read_config().steps == 8
