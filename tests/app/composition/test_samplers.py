"""Servers that are started for a run: on the GPUs that do not train, with weights in memory."""

import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread

from whet.app.composition.samplers import open_sampler
from whet.app.composition.weight_sync import describe_policy
from whet.config import resolve
from whet.io.files import make_memory_folder
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy

pytestmark = pytest.mark.anyio

PROGRAM = """#!{python}
import os, sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from support.servers.inference_server import ServerState, serve, vllm_app
port = sys.argv[sys.argv.index("--port") + 1]
server = serve(vllm_app, ServerState(str, 300, 512), int(port))
Path({folder!r}, "gpu-" + os.environ["CUDA_VISIBLE_DEVICES"]).write_text(server.url)
time.sleep(600)
"""


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return reply.read().decode()


async def test_two_servers_share_adapters_in_memory_on_the_gpus_that_do_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "vllm"
    program.write_text(PROGRAM.format(python=sys.executable, paths=sys.path, folder=str(tmp_path)))
    program.chmod(0o700)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    engine: dict[str, Any] = {
        "kind": "vllm",
        "command": str(program),
        "device": "cpu",
        "max_context": 512,
    }
    config = resolve({"model": "tiny", "engine": engine})
    model, run = resolve_model("tiny"), tmp_path / "run"
    assert config.trainer.kind == "local"
    policy = LocalPolicy(model, config.trainer, device="cpu", seed=0)
    policy.write_weights(tmp_path / "published.safetensors")
    first = describe_policy(config, model, 0, "")
    lines: list[str] = []
    opened = open_sampler(model, first, config, folder=run, training_gpus=1, progress=lines.append)
    async with opened as sampler:
        urls = [(tmp_path / f"gpu-{gpu}").read_text() for gpu in (5, 6)]
        next_one = describe_policy(config, model, 1, str(tmp_path / "published.safetensors"))
        await sampler.weights.load(next_one)
        memory = make_memory_folder(run, needed=0)
        assert memory is not None
        [adapter] = (memory / "served").iterdir()
        assert (adapter / "adapter_model.safetensors").is_file()
        for url in urls:
            assert adapter.name in await to_thread.run_sync(get, f"{url}/v1/models")
    assert not memory.exists()
    assert not (run / "served").exists()
    started = [line for line in lines if "vLLM starts" in line]
    assert ["on GPU 5;" in started[0], "on GPU 6;" in started[1]] == [True, True]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"
