"""Starts `vllm serve` for a run, with what the run needs of it and whatever the user adds."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from whet.config import EngineConfig, TrainerConfig
from whet.errors import ConfigError

STOP_S = 30.0
GPU = Path("/dev/nvidiactl")
"""There is one if this is there."""

TAKES_WEIGHTS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
"""What vLLM wants in its environment before it takes adapters or weights while it runs."""


class LaunchedVLLM:
    """A `vllm serve` that is kept running."""

    def __init__(
        self, model: Path, config: EngineConfig, needs: Sequence[str], *, log: Path
    ) -> None:
        """`needs` are flags of ours; those that the user set too are the user's.

        Raises:
            ConfigError: there is no such program.
        """
        program = shutil.which(config.command)
        if program is None:
            raise ConfigError(
                f"there is no program {config.command!r}: install vLLM in an environment of its "
                "own and name its program with --engine.command, or join servers that run with "
                "--engine.urls"
            )
        host, port = _address(config.flags)
        self.url = f"http://{host}:{port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._deaths: list[str] = []
        self._ready = False
        command = [program, "serve", str(model), *_without(needs, config.flags)]
        command += _without(["--host", host, "--port", str(port)], config.flags)
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "whet.engines.keeper", str(log), *command, *config.flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ
            | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"},
            start_new_session=True,  # Ctrl-C is for whoever started it, who then stops it
        )
        threading.Thread(target=self._listen, name="whet-vllm", daemon=True).start()

    def why_dead(self) -> str | None:
        """Why there is nothing to wait for, if so: it has never been ready and died."""
        if self._ready or not (self._deaths or self._keeper.poll() is not None):
            return None
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        said = " | ".join(line.strip() for line in lines if line.strip()[:1] not in ("", "^"))
        return f"`vllm serve` ended at once; {self.log} ends with: {said[-400:]}"

    def was_ready(self) -> None:
        """It answered: from now on it is started again when it dies."""
        self._ready = True

    def close(self) -> None:
        """Stop it with all its processes. Idempotent."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        try:
            self._keeper.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _listen(self) -> None:
        assert self._keeper.stdout is not None
        with self._keeper.stdout as told:
            for line in told:
                self._deaths.append(line.decode().strip())


def needed_flags(trainer: TrainerConfig, *, max_context: int | None, slots: int) -> list[str]:
    """What a run needs of `vllm serve`: log-probs of what was sampled, our grammars, adapters."""
    flags = ["--logprobs-mode", "processed_logprobs", "--dtype", _dtype(trainer.precision)]
    flags += ["--structured-outputs-config", '{"backend": "guidance"}']
    if max_context is not None:
        flags += ["--max-model-len", str(max_context)]
    if trainer.weights == "lora":
        flags += ["--enable-lora", "--max-lora-rank", str(_rank(trainer.lora_rank))]
        flags += ["--max-loras", str(slots), "--max-cpu-loras", str(slots + 1)]
    return flags


def _dtype(precision: Literal["auto", "fp32", "bf16"]) -> str:
    """As the trainer computes: what it takes for `auto` is decided in the same way."""
    if precision == "auto":
        precision = "bf16" if GPU.exists() else "fp32"
    return {"fp32": "float32", "bf16": "bfloat16"}[precision]


def _rank(rank: int) -> int:
    """The next of those that vLLM has kernels for."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def _without(flags: Sequence[str], given: Sequence[str]) -> list[str]:
    """Flags of ours, with their values, less those the user has set."""
    theirs = {flag.partition("=")[0] for flag in given if flag.startswith("--")}
    kept: list[str] = []
    for at, flag in enumerate(flags):
        if flag.startswith("--"):
            value = [f for f in flags[at + 1 : at + 2] if not f.startswith("--")]
            kept += [] if flag in theirs else [flag, *value]
    return kept


def _address(flags: Sequence[str]) -> tuple[str, int]:
    """Where it listens: as the user's flags say, else on this machine's free port."""
    values = dict(pairwise(flags))
    values |= dict(flag.split("=", 1) for flag in flags if flag.startswith("--") and "=" in flag)
    host = values.get("--host", "127.0.0.1")
    if "--port" in values:
        return host, int(values["--port"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return host, probe.getsockname()[1]
