"""The way from a checkpoint to a model by tinker-cookbook, unmodified, and by `whet models merge`.

$WHET_COOKBOOK names the Python of its environment: `make test-cookbook` installs it.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.servers.tinker_serving import KEY, MARKS, Server
from whet.app.cli.main import main
from whet.models.catalog import resolve_model

PYTHON = os.environ.get("WHET_COOKBOOK", "")
SCRIPT = Path(__file__).with_name("export.py")
NEAR = 1e-4

pytestmark = [
    *MARKS,
    pytest.mark.skipif(not PYTHON, reason="set WHET_COOKBOOK: run `make test-cookbook`"),
]


def test_checkpoints_are_downloaded_and_merged_exactly(tmp_path: Path) -> None:
    server = Server(tmp_path / "dir")
    service = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    out = tmp_path / "out"
    try:
        done = subprocess.run(
            [PYTHON, str(SCRIPT), str(resolve_model("tiny")), str(out)],
            env={**os.environ, **service, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=500,
        )
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    body, whole = json.loads(done.stdout.splitlines()[-1])
    for found in (body, whole):
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {*found["files"]}
        assert not any(name.endswith(".age") for name in found["files"])
        assert found["exports_left"] == []
    assert body["gap"] < NEAR
    # Merged into the matrix that input and output share, the inputs would change as well.
    assert "'lm_head.weight' which does not exist" in whole["error"]
    merged = tmp_path / "merged"
    assert main(["models", "merge", str(out / "True" / "adapter"), str(merged)]) == 0
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    ids = torch.tensor([whole["tokens"]])
    with torch.inference_mode():
        scores = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    assert scores.tolist() == pytest.approx(whole["served"], abs=NEAR)
