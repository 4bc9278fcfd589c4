"""What the server of the `tinker` wire trains and samples with, without the wire."""

from pathlib import Path

import anyio
import numpy as np
import pytest
import torch

from whet.app.cli import main
from whet.app.tinker_workshop import WEIGHTS, Base, LocalRuns, LocalSamplers
from whet.config import AdamConfig, resolve
from whet.policies.catalogue import resolve_model
from whet.tinker_server.workshop import Example, Lora, PromptAsked, Weights
from whet.types import Sampling

TOKENS = (5, 17, 42, 99)
LORA = Lora(rank=4)


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
    settings = {"device": device, "kv_tokens": 2048}
    config = resolve({"engine": settings, "trainer": {"precision": precision}})
    base = Base(resolve_model("tiny"), config)
    runs = LocalRuns(base)
    samplers = LocalSamplers(base, "tiny", (), engines=1)
    await runs.create("run", LORA, 1)
    trained, _ = runs._found("run")
    example = Example(TOKENS[:-1], np.array(TOKENS[1:]), {"weights": np.ones(3, np.float32)})
    for _ in range(2):
        await runs.forward_backward("run", [example], "cross_entropy", {}, forward_only=False)
        await runs.optim_step("run", AdamConfig(lr=1e-2))
    after = await runs.forward_backward("run", [example], "cross_entropy", {}, forward_only=True)
    await runs.save("run", tmp_path, "sampler_weights")
    saved = Weights(tmp_path, LORA)
    assert (tmp_path / WEIGHTS).exists()
    scores = await samplers.score(saved, TOKENS, PromptAsked())
    assert scores.chosen == pytest.approx(after.logprobs[0], abs=near)
    sampled = await samplers.sample(saved, TOKENS, Sampling(temperature=0, max_tokens=3))
    assert len(sampled.tokens) == 3
    [desk] = samplers._desks
    for policy in (base.policy, trained, desk.policy):
        assert policy.device == torch.device(device)
        assert policy.dtype == dtype
        assert {weight.dtype for weight in policy.model.parameters()} == {dtype}
    # The base model is in memory once, whoever trains or samples.
    embedding = base.policy.body.get_input_embeddings().weight.data_ptr()
    for policy in (trained, desk.policy):
        assert policy.body.get_input_embeddings().weight.data_ptr() == embedding
    await samplers.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tinker-server", "--port", "0", "--dir", str(tmp_path)]
    assert main([*command, "--engine.device", "cuda"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_another_engine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tinker-server", "--dir", str(tmp_path), "--engine", "vllm"]) == 2
    assert "engine.kind is 'vllm'" in capsys.readouterr().err


@pytest.mark.anyio
async def test_runs_made_at_once_have_the_adapters_of_their_seed() -> None:
    runs = LocalRuns(Base(resolve_model("tiny"), resolve({"engine": {"device": "cpu"}})))
    names = [f"run-{index}" for index in range(8)]
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(runs.create, name, LORA, 1)
    first, *others = [runs._found(name)[0].trainable() for name in names]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
