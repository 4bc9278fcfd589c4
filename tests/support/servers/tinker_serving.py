"""The server in a process of its own, and the real client."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from whet.config import RunConfig, resolve

if TYPE_CHECKING:  # the client takes seconds to import
    import tinker
    from tinker import types

    from whet.models.tinker import TinkerPolicy


MARKS = [
    pytest.mark.slow,
    # The client leaves its connections to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KEY = "tml-of-the-tests"
SERVER = (sys.executable, "-m", "whet", "tinker-server")


def tinker_config(server: "Server") -> RunConfig:
    """Training at a server, with adapters like those of the tiny llama."""
    service = {"base_url": server.url, "base_model": server.model}
    return resolve({"trainer": {"kind": "tinker", "lora_rank": 4, **service}})


def make_datum(model_input: "types.ModelInput", inputs: "dict[str, Any]") -> "types.Datum":
    """A datum whose inputs are lists, which the client turns into tensors."""
    from tinker import types

    return types.Datum(model_input=model_input, loss_fn_inputs=inputs)


async def open_tinker(server: "Server") -> "TinkerPolicy":
    """A policy at a server."""
    from whet.models.tinker import TinkerPolicy

    policy = await TinkerPolicy.open(tinker_config(server))
    server.close_before_stop(lambda: anyio.run(policy.close))
    return policy


class Server:
    """`whet tinker-server` at work; the address stays when it is started again."""

    def __init__(
        self,
        folder: Path,
        model: str = "tiny",
        flags: tuple[str, ...] = (),
        command: tuple[str, ...] = SERVER,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.model = model
        self.flags = flags
        self.command = command
        self._close_clients: list[Callable[[], object]] = []
        self.start()

    def start(self) -> None:
        command = [*self.command, "--port", str(self.port), "--dir", str(self.folder)]
        with (self.folder.parent / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--model", self.model, "--trainer.precision", "fp32", *self.flags],
                env={**os.environ, "TINKER_API_KEY": KEY},
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 300
        while not self._answers():
            assert self.process.poll() is None, (self.folder.parent / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close_before_stop(self, close: Callable[[], object]) -> None:
        """Close a client before the server stops; it would log warnings to the process's end."""
        self._close_clients.append(close)

    def stop(self) -> None:
        if self.process.poll() is None:
            for close in self._close_clients:
                close()
        self.process.terminate()
        self.process.wait(60)

    def client(self) -> "tinker.ServiceClient":
        import tinker

        service = tinker.ServiceClient(base_url=self.url, api_key=KEY)
        self.close_before_stop(lambda: service.close("success").result(60))
        return service

    def rest(self) -> "tinker.RestClient":
        import tinker

        return tinker.RestClient(base_url=self.url, api_key=KEY)

    def post(self, route: str, body: bytes | str, **headers: str) -> bytes:
        """A request without the client. Raises HTTPError."""
        sent = body.encode() if isinstance(body, str) else body
        known = {"X-API-Key": KEY, **headers}
        request = urllib.request.Request(f"{self.url}/api/v1/{route}", sent, known, method="POST")
        return urllib.request.urlopen(request, timeout=60).read()

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5).status == 200
        except OSError:
            return False
