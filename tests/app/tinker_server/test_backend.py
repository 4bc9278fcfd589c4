"""The Tinker server's backend, which trains and samples, without HTTP."""

import asyncio
import os
import shutil
import threading
import time
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from pydantic import JsonValue

from support.clock import Clock
from whet.app.cli.main import main
from whet.app.cli.tinker_server import read_models
from whet.app.tinker_server.backend import (
    WEIGHTS,
    BaseModel,
    Lora,
    Samplers,
    ServedModel,
    TrainingRuns,
    Weights,
    name_folder,
)
from whet.app.tinker_server.state import SESSION_KEPT_S, ServerState
from whet.app.tinker_server.storage import (
    Checkpoint,
    SamplingSession,
    Session,
    Storage,
    TrainingRun,
)
from whet.config import AdamStep, resolve
from whet.engines.scorer import ScoreRequest
from whet.errors import ConfigError, EngineError, NotFound, RequestError
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.trainers.tinker_datums import Datum
from whet.types import Sampling

TOKENS = (5, 17, 42, 99)
LORA = Lora(rank=4)


def embedding_address(policy: LocalPolicy) -> int:
    weight = policy.body.get_parameter("embed_tokens.weight")
    return weight.data_ptr()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
        ),
    ],
)
@pytest.mark.parametrize(
    ("precision", "dtype", "near"),
    [("fp32", torch.float32, 1e-4), ("bf16", torch.bfloat16, 0.1)],
)
async def test_device_and_precision_reach_training_and_sampling(
    tmp_path: Path, device: str, precision: str, dtype: torch.dtype, near: float
) -> None:
    settings: dict[str, JsonValue] = {"device": device, "kv_tokens": 2048}
    config = resolve({"engine": settings, "trainer": {"precision": precision}})
    base = BaseModel(resolve_model("tiny"), config)
    runs = TrainingRuns(base)
    samplers = Samplers(base, "tiny", (), engines=1)
    await runs.create("run", LORA, 1)
    trained, _ = runs._get("run")
    example = Datum(TOKENS[:-1], np.array(TOKENS[1:]), {"weights": np.ones(3, np.float32)})
    for _ in range(2):
        await runs.forward_backward("run", [example], "cross_entropy", {}, forward_only=False)
        await runs.optim_step("run", AdamStep(lr=1e-2))
    after = await runs.forward_backward("run", [example], "cross_entropy", {}, forward_only=True)
    await runs.save("run", tmp_path, "sampler_weights")
    saved = Weights(tmp_path, LORA, 0.0)
    assert (tmp_path / WEIGHTS).exists()
    scores = await samplers.score(saved, TOKENS, ScoreRequest())
    assert scores.chosen == pytest.approx(after.logprobs[0], abs=near)
    sampled = await samplers.sample(saved, TOKENS, Sampling(temperature=0, max_tokens=3))
    assert len(sampled.tokens) == 3
    [slot] = samplers._slots
    for policy in (base.policy, trained, slot.policy):
        assert policy.device == torch.device(device)
        assert policy.dtype == dtype
        assert {weight.dtype for weight in policy.model.parameters()} == {dtype}
    # The base model is in memory once, whoever trains or samples.
    embeddings = {embedding_address(policy) for policy in (base.policy, trained, slot.policy)}
    assert len(embeddings) == 1
    await samplers.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tinker-server", "--port", "0", "--dir", str(tmp_path)]
    assert main([*command, "--engine.device", "cuda"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_another_engine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tinker-server", "--dir", str(tmp_path), "--engine", "vllm"]) == 2
    assert "found engine.kind 'vllm'" in capsys.readouterr().err


@pytest.mark.anyio
async def test_a_forward_pass_that_fails_keeps_the_gradient(base: BaseModel) -> None:
    def example(weight: float) -> Datum:
        return Datum(TOKENS[:-1], np.array(TOKENS[1:]), {"weights": np.full(3, weight, np.float32)})

    runs = TrainingRuns(base)
    await runs.create("run", LORA, 1)
    await runs.forward_backward("run", [example(1)], "cross_entropy", {}, forward_only=False)
    with pytest.raises(RequestError, match="too large"):
        await runs.forward_backward("run", [example(3e38)], "cross_entropy", {}, forward_only=True)
    assert (await runs.optim_step("run", AdamStep(lr=1e-2)))["grad_norm:mean"] > 0


@pytest.mark.anyio
async def test_runs_made_at_once_have_the_adapters_of_their_seed() -> None:
    runs = TrainingRuns(BaseModel(resolve_model("tiny"), resolve({"engine": {"device": "cpu"}})))
    names = [f"run-{index}" for index in range(8)]
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(runs.create, name, LORA, 1)
    first, *others = [runs._get(name)[0].get_trainable() for name in names]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


async def _save_weights(base: BaseModel, folder: Path, seed: int) -> None:
    """Save adapters that are not the identity."""
    runs = TrainingRuns(base)
    await runs.create("run", LORA, seed)
    example = Datum(TOKENS[:-1], np.array(TOKENS[1:]), {"weights": np.ones(3, np.float32)})
    await runs.forward_backward("run", [example], "cross_entropy", {}, forward_only=False)
    await runs.optim_step("run", AdamStep(lr=1e-2 * seed))
    await runs.save("run", folder, "sampler_weights")


@pytest.fixture
def base() -> BaseModel:
    return BaseModel(resolve_model("tiny"), resolve({"engine": {"device": "cpu"}}))


@pytest.mark.anyio
async def test_weights_saved_again_under_a_name_are_loaded_again(
    base: BaseModel, tmp_path: Path
) -> None:
    samplers = Samplers(base, "tiny", (), engines=1)
    scores: list[list[float]] = []
    for saved_at in (1, 2):
        await _save_weights(base, tmp_path, seed=saved_at)
        weights = Weights(tmp_path, LORA, float(saved_at))
        found = await samplers.score(weights, TOKENS, ScoreRequest())
        scores.append(found.chosen.tolist())
    assert scores[0] != scores[1]
    await samplers.close()


@pytest.mark.anyio
async def test_no_set_of_weights_is_starved_by_the_load_on_others(
    base: BaseModel, tmp_path: Path
) -> None:
    await _save_weights(base, tmp_path, seed=1)
    samplers = Samplers(base, "tiny", (), engines=1)
    one, two = (Weights(tmp_path, LORA, float(n)) for n in (1, 2))
    served = anyio.Semaphore(0)

    async def load(tokens: int) -> None:
        while True:  # of other lengths, so that the engine is never idle
            await samplers.sample(one, TOKENS, Sampling(max_tokens=tokens))
            served.release()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for tokens in (13, 17, 23):
                tasks.start_soon(load, tokens)
            for _ in range(6):
                await served.acquire()
            for weights in (two, None, two):
                await samplers.sample(weights, TOKENS, Sampling(max_tokens=1))
                for _ in range(8):  # nor is the load starved
                    await served.acquire()
            tasks.cancel_scope.cancel()
    await samplers.close()


@pytest.mark.anyio
async def test_a_request_that_is_canceled_while_weights_load_leaves_no_load_behind(
    base: BaseModel, tmp_path: Path
) -> None:
    samplers = Samplers(base, "tiny", (), engines=1)
    sets: list[Weights] = []
    for seed in (1, 2):
        await _save_weights(base, tmp_path / f"{seed}", seed=seed)
        sets.append(Weights(tmp_path / f"{seed}", LORA, float(seed)))
    expected = [(await samplers.score(one, TOKENS, ScoreRequest())).chosen for one in sets]
    [slot] = samplers._slots
    with slot.policy.lock:  # which the load needs
        request = asyncio.create_task(samplers.score(sets[0], TOKENS, ScoreRequest()))
        await anyio.wait_all_tasks_blocked()
        request.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not request.done()
    for weights, scores in zip(sets, expected, strict=True):
        found = await samplers.score(weights, TOKENS, ScoreRequest())
        assert found.chosen == pytest.approx(scores, abs=1e-4)
    assert request.cancelled()
    await samplers.close()


@pytest.mark.anyio
async def test_a_request_that_is_canceled_twice_frees_its_engine(
    base: BaseModel, tmp_path: Path
) -> None:
    await _save_weights(base, tmp_path, seed=1)
    samplers = Samplers(base, "tiny", (), engines=2)
    one, two, three = (Weights(tmp_path, LORA, float(n)) for n in (1, 2, 3))
    await samplers.score(one, TOKENS, ScoreRequest())
    sampling = Sampling(max_tokens=900)
    request = asyncio.create_task(samplers.sample(one, TOKENS, sampling))
    await anyio.wait_all_tasks_blocked()
    await samplers.score(two, TOKENS, ScoreRequest())
    with samplers._slots[1].policy.lock:  # so that the other engine waits for its weights
        other = asyncio.create_task(samplers.score(three, TOKENS, ScoreRequest()))
        for _ in range(2):
            await anyio.wait_all_tasks_blocked()
            request.cancel()
        await anyio.wait_all_tasks_blocked()
    await asyncio.wait([request, other])
    assert [slot.busy for slot in samplers._slots] == [0, 0]
    await samplers.close()


@pytest.mark.anyio
async def test_weights_that_cannot_be_loaded_leave_no_engine_behind(
    base: BaseModel, tmp_path: Path
) -> None:
    samplers = Samplers(base, "tiny", (), engines=1)
    before = set(threading.enumerate())
    for number in range(3):
        missing = Weights(tmp_path / "missing", LORA, float(number))
        with pytest.raises(EngineError, match="cannot load the weights"):
            await samplers.score(missing, TOKENS, ScoreRequest())
    await samplers.close()
    left = set(threading.enumerate()) - before
    assert "whet-engine" not in {thread.name for thread in left}


@pytest.mark.parametrize(
    ("folder", "name"),
    [("/models/qwen", "/models/qwen/"), ("/a", "/a"), ("/data/models/qwen", "/data/models/qwen")],
)
def test_clients_find_the_tokenizer_of_any_folder(folder: str, name: str) -> None:
    assert name_folder(folder) == name
    with pytest.raises(ConfigError, match="at its colon: rename it, or name the model"):
        name_folder("/models/a:b")


def test_models_are_read_with_their_names() -> None:
    flags = ["tiny", "org/a=folder", "org/b=folder", "tiny"]
    assert read_models(flags) == {"tiny": [], "folder": ["org/a", "org/b"]}
    for wrong in ("=tiny", "name="):
        with pytest.raises(ConfigError, match=r"expected \[NAME=\]MODEL"):
            read_models([wrong])


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--model", "tiny=FOLDER", "--model", "tiny"], "two models have the name 'tiny'"),
        (["--model", "name="], "expected [NAME=]MODEL"),
    ],
)
def test_names_of_models_are_clear(
    flags: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(resolve_model("tiny"), tmp_path / "copy")
    arguments = [flag.replace("FOLDER", str(tmp_path / "copy")) for flag in flags]
    assert main(["tinker-server", "--dir", str(tmp_path), *arguments]) == 2
    assert error in capsys.readouterr().err


def test_a_session_that_is_silent_for_a_month_and_left_no_weights_is_forgotten(
    tmp_path: Path,
) -> None:
    storage = Storage(tmp_path)
    state = ServerState([], storage)
    for id in ("empty", "saved", "alive"):
        state.begin_session(Session(id=id, created=0))
        run = TrainingRun(id=f"{id}:train:0", session=id, created=0, base_model="tiny", lora=LORA)
        state.add_run(run)
        storage.save_sampler(
            SamplingSession(id=f"{id}:sample:0", session=id, base_model="tiny", model_path=None)
        )
    saved = Checkpoint(
        run="saved:train:0", kind="weights", name="x", created=0, base_model="tiny", lora=LORA
    )
    with storage.write(saved):
        pass
    for file in (tmp_path / "sessions").iterdir():
        os.utime(file, (0, time.time() - SESSION_KEPT_S - 9))
    state.touch("alive")
    state.begin_session(Session(id="new", created=1))
    assert {session.id for session in storage.list_sessions()} == {"saved", "alive", "new"}
    assert {run.session for run in storage.list_runs()} == {"saved", "alive"}
    assert {path.name for path in (tmp_path / "samplers").iterdir()} == {
        f"{id}:sample:0.json" for id in ("saved", "alive")
    }


@pytest.mark.anyio
async def test_weights_without_a_name_are_deleted_when_nothing_samples_from_them(
    base: BaseModel, tmp_path: Path
) -> None:
    storage, clock = Storage(tmp_path), Clock()
    samplers = Samplers(base, "tiny", (), engines=1)

    def start() -> ServerState:
        return ServerState([ServedModel(TrainingRuns(base), samplers)], storage, clock=clock)

    def save(state: ServerState, number: int) -> Checkpoint:
        saved = Checkpoint(
            run="s:train:0",
            kind="sampler_weights",
            name=f"n{number}",
            created=float(number),
            base_model="tiny",
            lora=LORA,
            ephemeral=True,
        )
        with storage.write(saved):
            pass
        storage.save_sampler(
            SamplingSession(id=f"s:{number}", session="s", base_model="tiny", model_path=saved.path)
        )
        state.mark_used(saved)
        state.drop_unnamed("s:train:0")
        return saved

    state = start()
    state.begin_session(Session(id="s", created=0))
    state.add_run(TrainingRun(id="s:train:0", session="s", created=0, base_model="tiny", lora=LORA))
    oldest = save(state, 0)
    for number in range(1, 20):
        clock.now += 100
        state.mark_used(oldest)  # a reference policy, say
        save(state, number)
    kept = [saved.name for saved in storage.list_unnamed("s:train:0")]
    assert kept == [*(f"n{number}" for number in range(19, 11, -1)), "n0"]
    assert len(storage.list_samplers("s")) == len(kept)

    state = start()  # after a kill a client may come back
    state.drop_inactive()
    assert len(storage.list_unnamed("s:train:0")) == len(kept)
    clock.now += 3601
    state.drop_inactive()
    assert storage.list_unnamed("s:train:0") == []
    assert storage.list_samplers("s") == []


@pytest.mark.anyio
async def test_a_run_whose_session_ends_while_it_is_made_does_not_stay_in_memory(
    base: BaseModel, tmp_path: Path
) -> None:
    runs = TrainingRuns(base)
    state = ServerState(
        [ServedModel(runs, Samplers(base, "tiny", (), engines=1))], Storage(tmp_path)
    )
    state.begin_session(Session(id="s", created=0))
    run = TrainingRun(id="s:train:0", session="s", created=0, base_model="tiny", lora=LORA)
    await runs.create(run.id, LORA, 1)
    state.finish("s")
    with pytest.raises(RequestError, match="has ended"):
        state.add_run(run)
    with pytest.raises(NotFound):
        runs._get(run.id)
