"""A client whose machine sleeps: it is stopped, others go on, and later it goes on as well."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from support.servers.tinker_serving import KEY, MARKS, Server

pytestmark = MARKS

SAMPLES_TIMEOUT_S = 15
"""Of the server here, instead of two minutes; clients send a heartbeat every ten seconds."""

SERVER = f"""
import sys
from whet.app.cli.main import main
from whet.app.tinker_server import state

state.SAMPLES_TIMEOUT_S = {SAMPLES_TIMEOUT_S}
sys.exit(main())
"""

CLIENT = """
import sys
import tinker
from tinker import types

tokens = [5, 17, 42, 99, 120, 7]
prompt = types.ModelInput.from_ints(tokens[:-1])
data = [types.Datum(
    model_input=prompt, loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 5}
)]
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
training = service.create_lora_training_client(base_model="tiny", rank=8, seed=1)
sampling = service.create_sampling_client(base_model="tiny")

def step():
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    return training.forward(data, "cross_entropy").result().metrics["loss:sum"]

print(step(), flush=True)
params = types.SamplingParams(max_tokens=900, stop=[], seed=1)
samples = sampling.sample(prompt, 16, params)
print("sampling", flush=True)
print([sequence.tokens for sequence in samples.result().sequences], flush=True)
print(step(), flush=True)
"""


@pytest.fixture
def server(tmp_path: Path) -> Generator[Server]:
    server = Server(tmp_path / "dir", command=(sys.executable, "-c", SERVER, "tinker-server"))
    yield server
    server.stop()


def run_client(server: Server) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.url, KEY], stdout=subprocess.PIPE, text=True
    )


def test_a_client_that_was_stopped_keeps_its_run_and_gets_its_samples(server: Server) -> None:
    with run_client(server) as undisturbed:
        expected = undisturbed.communicate()[0].splitlines()
    with run_client(server) as client:
        assert client.stdout is not None
        output = [client.stdout.readline().strip(), client.stdout.readline().strip()]
        client.send_signal(signal.SIGSTOP)
        other = json.loads(server.post("create_session", '{"tags": [], "sdk_version": "0.36.0"}'))
        woken = time.monotonic() + SAMPLES_TIMEOUT_S + 2
        while time.monotonic() < woken:  # others' heartbeats find clients that are silent
            server.post("session_heartbeat", json.dumps({"session_id": other["session_id"]}))
            time.sleep(0.5)
        client.send_signal(signal.SIGCONT)
        output += client.communicate()[0].splitlines()
        assert client.returncode == 0
    assert [json.loads(output[0]), output[1], json.loads(output[2])] == [
        pytest.approx(json.loads(expected[0])),
        "sampling",
        json.loads(expected[2]),
    ]
    assert json.loads(output[3]) == pytest.approx(json.loads(expected[3]))
