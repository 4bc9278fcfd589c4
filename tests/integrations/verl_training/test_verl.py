"""verl's own parts on rollouts of the tiny model through our gateway, on a CPU.

`make test-verl` runs these in an environment of their own.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="run `make test-verl`")

from integrations.verl_training.running import VERSION, Verl
from whet.training.rows import build_rows
from whet.types import Credit, Row, Status

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TASKS = [{"name": f"task {n}", "conversations": 1 + n % 2} for n in range(3)]
PATIENCE_S = 300


def until(holds: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def batch(verl: Verl) -> Any:
    """The rows of three prompts with four sessions each, sampled by verl's replay buffer."""
    runner = verl.start_runner()
    verl.submit(TASKS)
    found = verl.sample(len(TASKS))
    runner.terminate()
    runner.wait(60)
    return found


@pytest.fixture(scope="module")
def credited(verl: Verl, batch: Any) -> Any:
    """The rows with the advantages that verl computes by our estimator."""
    metrics: dict[str, Any] = {}
    updated = verl.trainer._compute_old_log_prob(batch, metrics)
    return verl.trainer._compute_advantage(updated, metrics)


def our_rows(verl: Verl, keys: list[str]) -> dict[str, Row]:
    """The rows that whet builds from its own records, by verl's keys."""
    sessions = dict.fromkeys(key.rsplit("_", 1)[0] for key in keys)
    rollouts = [name.replace("_", "-") for name in sessions]
    trajectories = verl.ask(lambda store: store.trajectories(rollouts))
    assert len(trajectories) == len(rollouts)
    found: dict[str, Row] = {}
    for name, trajectory in zip(sessions, trajectories, strict=True):
        for index, row in enumerate(build_rows([Credit.even(trajectory, 1.0)]).rows):
            found[f"{name}_{index}"] = row
    return found


def test_rows_are_ours_token_for_token(verl: Verl, batch: Any) -> None:
    rows = our_rows(verl, batch.keys)
    assert sorted(rows) == sorted(batch.keys)
    per_session = Counter(key.rsplit("_", 1)[0] for key in batch.keys)
    assert set(per_session.values()) == {1, 2}, "some sessions have two rows"
    fields = ["prompts", "responses", "input_ids", "response_mask", "rollout_log_probs"]
    data = verl.read(batch, fields)
    for place, key in enumerate(batch.keys):
        row = rows[key]
        start = row.segments[0].start
        sampled = [t for s in row.segments for t in range(s.start - start, s.end - start)]
        assert data["input_ids"][place].tolist() == list(row.tokens)
        assert data["prompts"][place].tolist() == list(row.tokens[:start])
        assert data["responses"][place].tolist() == list(row.tokens[start:])
        mask = data["response_mask"][place].tolist()
        assert [t for t, bit in enumerate(mask) if bit] == sampled
        assert len(row.segments) == 2, "two turns of one conversation"
        logprobs = [p for segment in row.segments for p in segment.logprobs]
        assert data["rollout_log_probs"][place][sampled].tolist() == pytest.approx(logprobs)
    tag = batch.tags[0]
    assert (tag["min_global_steps"], tag["max_global_steps"]) == (VERSION, VERSION)
    assert all({"status", "prompt_len", "response_len", "seq_len"} <= set(t) for t in batch.tags)


def test_what_agents_ask_for_does_not_change_the_distribution(verl: Verl, batch: Any) -> None:
    """The agent asks for top_p 0.5, which verl's actor could not reproduce."""
    rows = our_rows(verl, batch.keys)
    assert {s.top_p for row in rows.values() for s in row.segments} == {1.0}
    assert {s.temperature for row in rows.values() for s in row.segments} == {1.0}


def test_a_rollout_weighs_as_one_however_many_rows_it_has(verl: Verl, credited: Any) -> None:
    data = verl.read(credited, ["advantages", "response_mask", "rm_scores"])
    rewards: dict[str, float] = {}
    weights: dict[str, float] = {}
    signs: dict[str, float] = {}
    for place, key in enumerate(credited.keys):
        session = key.rsplit("_", 1)[0]
        mask = data["response_mask"][place].bool()
        advantages = data["advantages"][place]
        assert not advantages[~mask].any(), "context has no advantage"
        rewards[session] = float(data["rm_scores"][place].sum())
        weights[session] = weights.get(session, 0.0) + float(advantages[mask].sum())
        signs[session] = float(advantages[mask][0])
    for session, reward in rewards.items():
        group = [r for s, r in rewards.items() if s.split("_")[0] == session.split("_")[0]]
        expected = reward - sum(group) / len(group)
        # Summed over all tokens of all rows of the rollout it is the rollout's advantage.
        assert weights[session] == pytest.approx(expected, abs=1e-5)
    assert any(signs.values()), "the rewards differ"


def values(column: Any) -> list[Any]:
    """A column of TransferQueue as plain values: numbers are a tensor there, texts a list."""
    return column.tolist() if hasattr(column, "tolist") else list(column)


def test_validation_rows_have_what_verl_reads(verl: Verl, batch: Any) -> None:
    runner = verl.start_runner()
    uids = verl.submit([{"name": "val", "conversations": 1}], "val")
    found = verl.sample(1, "val")
    data = verl.read(found, ["uid", "data_source", "reward_model", "extra_fields", "num_turns"])
    assert values(data["uid"]) == uids
    assert values(data["data_source"]) == ["whet"]
    assert values(data["num_turns"]) == [2]
    runner.terminate()
    runner.wait(60)


def test_a_failed_session_fails_its_prompt_alone(verl: Verl, batch: Any) -> None:
    runner = verl.start_runner()
    good = {"name": "good", "conversations": 1}
    uids = verl.submit([good, {"name": "bad", "conversations": 1, "fails": True}])
    import transfer_queue as tq

    def statuses() -> list[str]:
        tags = tq.kv_list("train")["train"]
        return [tags[uid]["status"] for uid in uids]

    until(lambda: not {"pending", "running"} & set(statuses()), "both prompts end")
    assert statuses() == ["finished", "failure"]
    keys = [key for key in tq.kv_list("train")["train"] if "_" in key]
    assert Counter(key.split("_")[0] for key in keys)[uids[0]] == 4
    assert not [key for key in keys if key.split("_")[0] == uids[1]]
    tq.kv_clear(keys=[*uids, *[k for k in keys if k.split("_")[0] in uids]], partition_id="train")
    runner.terminate()
    runner.wait(60)


def test_a_killed_runner_and_a_killed_manager_lose_nothing(verl: Verl, batch: Any) -> None:
    import ray

    task = {"name": "slow", "conversations": 1, "wait": "go"}
    first = verl.start_runner()
    uids = verl.submit([task])
    ids = [f"{uids[0]}-{n}" for n in range(4)]

    def running() -> bool:
        records = verl.ask(lambda store: store.rollouts(group=uids[0]))
        return [record.status for record in records] == [Status.RUNNING] * 4

    until(running, "all four sessions run")
    first.kill()
    first.wait()
    # Ray starts the actor again, elsewhere if need be, and repeats its unfinished call.
    ray.kill(verl.manager._actor, no_restart=False)
    (verl.folder / "go").touch()
    second = verl.start_runner()

    found = verl.sample(1)
    assert Counter(key.split("_")[0] for key in found.keys) == {uids[0]: 4}
    assert sorted(our_rows(verl, found.keys)) == sorted(found.keys)
    attempts = [verl.ask(lambda store, id=id: store.attempts(id)) for id in ids]
    assert all(each[-1].status is Status.SUCCEEDED for each in attempts)
    assert any(len(each) > 1 for each in attempts), "the killed runner's were run again"
    verl.clear(found, uids)
    second.terminate()
    second.wait(60)


def test_verls_engine_takes_optimizer_steps_on_the_rows(
    verl: Verl, credited: Any, tmp_path: Path
) -> None:
    """verl's FSDP2 engine with its own ppo_loss, which calls the loss of our plugin."""
    fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "advantages"]
    data = verl.read(credited, fields)
    rows = {name: [row.tolist() for row in data[name].unbind()] for name in fields}
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_step.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    sys.stdout.write(done.stdout.splitlines()[-1] + "\n")
    result = json.loads(done.stdout.splitlines()[-1])
    # The sampler's log-probabilities are those of verl's actor, in the same context.
    assert result["logprob_difference"] < 1e-4
    assert result["losses"][-1] < result["losses"][0], "three steps on the same rows"
    assert result["change"] > 0


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_an_unknown_key_is_explained_before_ray_starts(tmp_path: Path) -> None:
    settings = tmp_path / "verl.json"
    settings.write_text(json.dumps({"actor_rollout_ref.actor.clip_ratio_hih": 0.28}))
    code = (
        "import sys; from whet.app.verl.entrypoint import main; "
        f"code = main([{str(settings)!r}, '--check']); "
        "print('ray' in sys.modules, 'verl' in sys.modules); sys.exit(code)"
    )
    done = run_python(code)
    assert done.returncode == 2
    assert done.stdout.split() == ["False", "False"]
    expected = "whet: verl's config has no key 'actor_rollout_ref.actor.clip_ratio_hih', perhaps "
    assert done.stderr.startswith(expected + "'actor_rollout_ref.actor.clip_ratio_high'")


def test_verls_own_checks_of_its_config_are_one_line(tmp_path: Path) -> None:
    settings = tmp_path / "verl.json"
    settings.write_text(json.dumps({"data.train_batch_size": 2}))
    code = (
        "import sys; from whet.app.verl.entrypoint import main; "
        f"sys.exit(main([{str(settings)!r}, '--check']))"
    )
    done = run_python(code)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("whet: verl refuses the config")


def test_another_version_of_verl_is_one_line(tmp_path: Path) -> None:
    other = tmp_path / "verl-0.8.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.8.0\n")
    code = "import sys; from whet.app.verl.entrypoint import main; sys.exit(main(['none.json']))"
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = run_python(code, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("whet: found verl 0.8.0, expected 0.9.1")
