"""Malformed requests: each gets an error of one line, and the server goes on."""

import http.client
import json
import socket
import time
import urllib.error
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from support.servers.tinker_serving import KEY, MARKS, Server

pytestmark = MARKS

HUGE = 10**30
MODEL = {"session_id": "x", "model_seq_id": 0, "base_model": "tiny"}


@pytest.fixture(autouse=True)
def quiet(server: Server) -> Generator[None]:
    """No request leaves a trace of ours in the log, and the server answers as before."""
    log = server.folder.parent / "server.log"
    before = log.read_text()
    yield
    assert "Traceback" not in log.read_text().removeprefix(before)
    assert "Warning" not in log.read_text().removeprefix(before)
    assert json.loads(server.post("create_session", b"{}"))["session_id"]


@pytest.fixture(scope="module")
def session(server: Server) -> str:
    return json.loads(server.post("create_session", b"{}"))["session_id"]


class Run:
    """A training run, asked for without the client."""

    def __init__(self, server: Server, session: str) -> None:
        request = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        made = server.post("create_model", json.dumps({**request, "lora_config": {"rank": 2}}))
        self._server = server
        self._number = 0
        self.id: str = json.loads(made)["model_id"]
        self.answer(self.id)

    def ask(self, route: str, body: dict[str, Any]) -> bytes:
        request = {"model_id": self.id, "seq_id": self._next(), **body}
        return self.answer(json.loads(self._server.post(route, json.dumps(request)))["request_id"])

    def train(self, change: Callable[[pb.Datum], Any] = lambda datum: None) -> bytes:
        datum = pb.Datum()
        datum.model_input.add().encoded_text.tokens = np.array([5, 6], np.int32).tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(dense([6, 7], np.int64))
        datum.loss_fn_inputs["weights"].CopyFrom(dense([1, 1], np.float32))
        change(datum)
        request = pb.ForwardBackwardRequest(
            model_id=self.id, seq_id=self._next(), loss_fn="cross_entropy", data=[datum]
        )
        sent = self._server.post("forward_backward", request.SerializeToString())
        return self.answer(json.loads(sent)["request_id"])

    def answer(self, request: str) -> bytes:
        return self._server.post("retrieve_future", json.dumps({"request_id": request}))

    def _next(self) -> int:
        self._number += 1
        return self._number


@pytest.fixture(scope="module")
def run(server: Server, session: str) -> Run:
    return Run(server, session)


def dense(values: Any, kind: Any) -> pb.Tensor:
    array = np.array(values, kind)
    dtype = pb.DTYPE_FLOAT32 if kind is np.float32 else pb.DTYPE_INT64
    return pb.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape)


def sparse(shape: list[int], ends: list[int], places: list[int]) -> pb.Tensor:
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape)
    tensor.sparse_csr.values = np.ones(len(places), np.float32).tobytes()
    tensor.sparse_csr.crow_indices = np.array(ends, np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.array(places, np.int64).tobytes()
    return tensor


def refused(server: Server, route: str, body: Any, **headers: str) -> tuple[int, str]:
    sent = body if isinstance(body, bytes) else json.dumps(body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(route, sent, **headers)
    detail = json.load(caught.value)["detail"]
    assert "\n" not in detail
    return caught.value.code, detail


@pytest.mark.parametrize(
    ("route", "body", "status", "error"),
    [
        ("create_model", b"{", 400, "not JSON"),
        ("create_model", b"[" * 100_000, 400, "not JSON"),
        ("create_model", b"\xff\xfe", 400, "not JSON"),
        ("create_model", [], 400, "object"),
        ("create_model", {"session_id": ".", "model_seq_id": 0, "base_model": "tiny"}, 400, "'.'"),
        ("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": "tiny"}, 404, "x"),
        ("create_model", {"session_id": "x", "model_seq_id": HUGE}, 400, "model_seq_id"),
        ("create_model", MODEL | {"lora_config": {"rank": 1025}}, 400, "rank"),
        ("create_model", MODEL | {"lora_config": {"rank": 0}}, 400, "rank"),
        ("optim_step", {"model_id": "../../x", "seq_id": 1}, 404, "not in memory"),
        ("optim_step", {"model_id": 5, "seq_id": 1}, 400, "model_id"),
        ("optim_step", {"model_id": "x", "seq_id": HUGE}, 400, "seq_id"),
        ("forward_backward", b"\xff\xff\xff", 400, "not a ForwardBackwardRequest"),
        ("forward_backward", b"", 400, "seq_id"),
        ("create_sampling_session", {"session_id": "x"}, 400, "sampling_session_seq_id"),
        ("asample", {"sampling_session_id": "none"}, 400, "seq_id"),
        ("weights_info", {"tinker_path": "tinker://../../x/weights/y"}, 400, "invalid checkpoint"),
        ("weights_info", {"tinker_path": "tinker://x/weights/.."}, 400, "invalid name"),
        ("weights_info", {"tinker_path": "tinker://x/weights/y"}, 404, "unknown checkpoint"),
        ("retrieve_future", {"request_id": "none"}, 410, "unknown request"),
        ("session_heartbeat", {"session_id": "none"}, 404, "unknown session"),
        ("sessions/none/finish", {}, 404, "unknown session"),
        ("client/config", {"sdk_version": "0.25.0"}, 400, "pip install"),
        ("no_such_thing", {}, 404, "unknown endpoint POST"),
        ("training_runs", {}, 405, "unknown endpoint POST"),
    ],
)  # fmt: skip
def test_an_invalid_request_is_refused(
    server: Server, route: str, body: Any, status: int, error: str
) -> None:
    code, detail = refused(server, route, body)
    assert code == status
    assert error in detail


@pytest.mark.parametrize("key", ["", "tml-another", "tml-\xe4"])
def test_a_wrong_key(server: Server, key: str) -> None:
    found = refused(server, "create_session", {}, **{"X-API-Key": key})
    assert found == (401, "invalid API key: set TINKER_API_KEY")


@pytest.mark.parametrize("host", ["x/api/v1/files/?", "x/api/v1/healthz?", "x/api/v1/files/#"])
@pytest.mark.parametrize("route", ["create_session", "healthzx", "healthz/../create_session"])
def test_no_host_or_path_opens_the_server_without_a_key(
    server: Server, host: str, route: str
) -> None:
    found = refused(server, route, {}, **{"X-API-Key": "", "Host": host})
    assert found == (401, "invalid API key: set TINKER_API_KEY")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d.model_input[0].encoded_text.ClearField("tokens"), "0 tokens"),
        (lambda d: setattr(d.model_input[0].encoded_text, "tokens", b"abc"), "3 bytes"),
        (lambda d: d.model_input.add().image.SetInParent(), "images"),
        (lambda d: d.loss_fn_inputs["weights"].CopyFrom(dense([1], np.float32)), "shape (1,)"),
        (lambda d: setattr(d.loss_fn_inputs["weights"], "dtype", 99), "an invalid tensor"),
        (lambda d: d.loss_fn_inputs["weights"].shape.append(10**12), "an invalid tensor"),
        (lambda d: d.loss_fn_inputs["weights"].CopyFrom(sparse([HUGE // 10**24] * 2, [0, 1], [0])),
         "more than"),
        (lambda d: d.loss_fn_inputs["weights"].CopyFrom(sparse([2, 3], [0, 5, 1], [0])),
         "an invalid tensor"),
        (lambda d: d.loss_fn_inputs["weights"].CopyFrom(sparse([2, 3], [0, 1, 2], [0, 7])),
         "an invalid tensor"),
        (lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(dense([np.nan, 2], np.float32)),
         "float32"),
        (lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(dense([2**40, 2], np.int64)),
         "outside 0"),
        (lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(dense([[], []], np.int64)),
         "shape (2, 0)"),
    ],
)  # fmt: skip
def test_an_invalid_datum_is_refused(
    run: Run, change: Callable[[pb.Datum], Any], error: str
) -> None:
    found = json.loads(run.train(change))
    assert error in found["error"]
    assert found["category"] == "user"
    assert b"loss:sum" in run.train(), "the run goes on"


@pytest.mark.parametrize(
    ("route", "body", "error"),
    [
        ("optim_step", {}, "supports AdamW only"),
        ("optim_step", {"adam_params": {"learning_rate": "much"}}, "learning_rate"),
        ("save_weights", {"path": "../x"}, "invalid checkpoint path"),
        ("save_weights", {"path": ".."}, "invalid name"),
        ("save_weights", {"path": "a\0b"}, "invalid name"),
        ("save_weights", {"path": "x" * 300}, "invalid name"),
        ("save_weights", {"path": 5}, "path"),
        ("save_weights", {}, "missing checkpoint name"),
        ("save_weights", {"path": "long", "ttl_seconds": HUGE}, "ttl_seconds"),
        ("load_weights", {"path": "/etc/passwd", "optimizer": True}, "invalid checkpoint path"),
        ("load_weights", {"path": "tinker://x/weights/y", "optimizer": True}, "unknown checkpoint"),
    ],
)
def test_a_request_that_fails_takes_its_turn(
    run: Run, route: str, body: dict[str, Any], error: str
) -> None:
    found = json.loads(run.ask(route, body))
    assert error in found["error"]
    assert found["category"] == "user"
    assert b"loss:sum" in run.train(), "the run goes on"


def test_a_number_is_taken_once(server: Server, run: Run) -> None:
    run.train()
    request = {"model_id": run.id, "seq_id": 1, "adam_params": {}}
    # Its answer is still kept, and given again; nothing is done twice.
    sent = json.loads(server.post("optim_step", json.dumps(request)))["request_id"]
    assert run.answer(sent) == run.answer(f"{run.id}:1")


@pytest.fixture
def sample(server: Server, session: str) -> dict[str, Any]:
    """A request that is good."""
    made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = json.loads(server.post("create_sampling_session", json.dumps(made)))
    return {
        "sampling_session_id": sampler["sampling_session_id"],
        "seq_id": time.monotonic_ns(),
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 1},
    }


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt": {"chunks": [{"tokens": [HUGE]}]}}, "tokens.0"),
        ({"prompt": {"chunks": [{"tokens": ["a"]}]}}, "tokens.0"),
        ({"num_samples": 4097}, "num_samples"),
        ({"topk_sample_logprobs": 21}, "topk_sample_logprobs"),
        ({"topk_prompt_logprobs": 1001}, "topk_prompt_logprobs"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"stop": [HUGE]}}, "stop"),
        ({"target_prompt_logprobs": {"data": [HUGE], "shape": [1, 1]}}, "data.0"),
    ],
)
def test_an_invalid_sample_request_is_refused(
    server: Server, sample: dict[str, Any], change: dict[str, Any], error: str
) -> None:
    code, detail = refused(server, "asample", {**sample, **change})
    assert code == 400
    assert error in detail


SPARSE = {"data": [7], "shape": [1, 8], "sparse_crow_indices": [0, 1], "sparse_col_indices": [3]}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt": {"chunks": []}}, "no tokens"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "images"),
        ({"prompt": {"chunks": [{"tokens": [5000]}]}}, "outside 0"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"temperature": 10.1}}, "temperature"),
        ({"sampling_params": {"top_p": 2}}, "top_p"),
        ({"target_prompt_logprobs": {"data": [1, 2], "shape": [1, 1]}}, "match its shape"),
        (
            {"target_prompt_logprobs": {"data": [], "shape": [1, 10**15]}},
            "match its shape",
        ),
        ({"target_prompt_logprobs": SPARSE | {"shape": [1, 10**15]}}, "entries are more than"),
        ({"target_prompt_logprobs": SPARSE | {"shape": [1, -2]}}, "invalid tensor"),
        ({"target_prompt_logprobs": SPARSE | {"sparse_col_indices": [HUGE]}}, "invalid tensor"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 9}, "at most 1"),
    ],
)
def test_sampling_that_is_impossible_is_refused(
    server: Server, run: Run, sample: dict[str, Any], change: dict[str, Any], error: str
) -> None:
    sent = json.loads(server.post("asample", json.dumps({**sample, **change})))["request_id"]
    found = json.loads(run.answer(sent))
    assert error in found["error"]
    assert found["category"] == "user"


@pytest.mark.parametrize("known", [True, False])
def test_a_body_that_unpacks_to_more_than_is_read(server: Server, known: bool) -> None:
    packer = zstandard.ZstdCompressor(write_content_size=known)
    packed = packer.compress(bytes(600 * 2**20))
    code, _ = refused(server, "forward_backward", packed, **{"Content-Encoding": "zstd"})
    assert code in (400, 413)
    code, detail = refused(server, "forward_backward", b"abc", **{"Content-Encoding": "gzip"})
    assert (code, "zstd" in detail) == (400, True)


def test_a_body_larger_than_is_read_is_not_waited_for(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest("POST", "/api/v1/optim_step")
    connection.putheader("X-API-Key", KEY)
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_is_cut_off_is_dropped_without_a_trace(server: Server) -> None:
    head = f"POST /api/v1/optim_step HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: 500\r\n\r\nabc".encode())


def test_a_session_that_has_ended(server: Server) -> None:
    session = json.loads(server.post("create_session", b"{}"))["session_id"]
    run = Run(server, session)
    ahead = {"model_id": run.id, "seq_id": 5, "adam_params": {}}
    sent = json.loads(server.post("optim_step", json.dumps(ahead)))["request_id"]
    server.post(f"sessions/{session}/finish", b"{}")
    assert "has ended" in json.loads(run.answer(sent))["error"], "its turn will never come"
    made = {"session_id": session, "model_seq_id": 1, "base_model": "tiny"}
    assert refused(server, "create_model", {**made, "lora_config": {"rank": 2}})[0] == 400
    assert refused(server, "session_heartbeat", {"session_id": session})[0] == 410


def test_addresses_lead_to_files_of_a_checkpoint_alone(server: Server) -> None:
    for token in ("x", "9999999999-abc", "9" * 5000 + "-abc", "%c2%b2-abc", "9999999999-%c2%b2"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", f"/api/v1/files/{token}/run/name/../../run.json")
        assert connection.getresponse().status == 400
        connection.close()
