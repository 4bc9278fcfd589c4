"""Recipes of tinker-cookbook, unmodified, against the server, both killed and started again.

$WHET_COOKBOOK names the Python of their environment: `make test-cookbook` installs it.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from support.runs.commands import EXAMPLES
from support.servers.tinker_serving import KEY, MARKS, Server
from whet.models.catalog import resolve_model

PYTHON = os.environ.get("WHET_COOKBOOK", "")
NAME = "Qwen/Qwen3-8B"
"""The recipes choose renderers by the model's name."""
STEPS = {"sl_loop": 40, "rl_loop": 4, "math_rl.train": 4, "preference.dpo.train": 4}
"""Enough of each that it is killed in the middle: a step of sl_loop takes less than a look."""
RECIPES = {
    "sl_loop": ("batch_size=4", "max_length=256", "save_every=1", "lora_rank=8"),
    "rl_loop": ("batch_size=2", "group_size=4", "max_tokens=8", "save_every=1", "lora_rank=8"),
    "math_rl.train": (
        *("env=arithmetic", "groups_per_batch=4", "group_size=4", "max_steps_off_policy=2"),
        *("save_every=1", "eval_every=0", "lora_rank=8", "behavior_if_log_dir_exists=resume"),
    ),
    "preference.dpo.train": (
        *("dataset=hhh", "batch_size=4", "max_length=256", "behavior_if_log_dir_exists=resume"),
    ),
}

pytestmark = [
    *MARKS,
    pytest.mark.skipif(not PYTHON, reason="set WHET_COOKBOOK: run `make test-cookbook`"),
]


def write_dataset(folder: Path, rows: list[dict[str, object]], config: str = "default") -> None:
    """Write made-up data where the recipe looks for a dataset of the Hub."""
    folder.mkdir(parents=True)
    splits = "".join(f"  - split: {s}\n    path: {s}.jsonl\n" for s in ("train", "test"))
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{splits}---\n"
    (folder / "README.md").write_text(card)
    for split in ("train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder in which the names of the Hub are folders."""
    folder = tmp_path_factory.mktemp("cookbook")
    (folder / "Qwen").mkdir()
    (folder / NAME).symlink_to(resolve_model("tiny"))
    numbers = range(200)
    chats = [[("user", f"Say {n}"), ("assistant", f"It is {n}.")] for n in numbers]
    messages = [[{"role": role, "content": text} for role, text in chat] for chat in chats]
    write_dataset(folder / "HuggingFaceH4/no_robots", [{"messages": each} for each in messages])
    sums: list[dict[str, object]] = [
        {"question": f"What is {n} + 1?", "answer": f"One more.\n#### {n + 1}"} for n in numbers
    ]
    write_dataset(folder / "openai/gsm8k", sums, config="main")
    pairs: list[dict[str, object]] = [
        {
            side: f"\n\nHuman: Say {n}\n\nAssistant: {text}"
            for side, text in (("chosen", f"It is {n}."), ("rejected", "No."))
        }
        for n in numbers
    ]
    write_dataset(folder / "Anthropic/hh-rlhf", pairs)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    server = Server(tmp_path_factory.mktemp("tinker") / "dir", model=f"{NAME}=tiny")
    yield server
    server.stop()


def read_steps(log: Path) -> list[int]:
    """The steps that a recipe has logged, in their order."""
    try:
        lines = (log / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines]
    return [line["step"] for line in found if "step" in line]


def build_environment(folder: Path, server: Server) -> dict[str, str]:
    """The variables of a recipe. Its datasets are cached by name, so it has a cache of its own."""
    return {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": KEY,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "PYTHONPATH": "",
    }


def start(recipe: str, folder: Path, server: Server) -> subprocess.Popen[bytes]:
    module = f"tinker_cookbook.recipes.{recipe}"
    common = (f"model_name={NAME}", f"max_steps={STEPS[recipe]}")
    with (folder / f"{recipe}.log").open("ab") as log:
        return subprocess.Popen(
            [PYTHON, "-m", module, *common, *RECIPES[recipe], f"log_path={folder / recipe}"],
            cwd=folder,
            env=build_environment(folder, server),
            stdout=log,
            stderr=log,
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_goes_on_after_a_kill(recipe: str, folder: Path, server: Server) -> None:
    log = folder / recipe
    running = start(recipe, folder, server)
    deadline = time.monotonic() + 900
    while len(read_steps(log)) < 2:
        assert running.poll() is None, (folder / f"{recipe}.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    before = read_steps(log)
    assert len(before) < STEPS[recipe], "it ended before it was killed"
    server.kill()
    server.start()
    assert start(recipe, folder, server).wait(900) == 0, (folder / f"{recipe}.log").read_text()[
        -3000:
    ]
    after = read_steps(log)[len(before) :]
    assert after[-1] == STEPS[recipe] - 1
    assert sorted({*before, *after}) == list(range(STEPS[recipe]))


def test_the_example_of_the_cookbook_raises_its_reward(folder: Path, server: Server) -> None:
    log, output = folder / "cookbook.log", folder / "said"
    script = EXAMPLES / "tinker_client" / "cookbook_rl.py"
    with output.open("wb") as out:
        done = subprocess.run(
            [PYTHON, script, "--model", NAME, "--log", log, "--steps", "12"],
            cwd=folder,
            env=build_environment(folder, server),
            stdout=out,
            stderr=out,
            check=False,
        )
    assert done.returncode == 0, output.read_text()[-3000:]
    rewards = [json.loads(line)["env/all/reward/total"] for line in log.read_text().splitlines()]
    assert len(rewards) == 12
    assert rewards[-1] > rewards[0]
