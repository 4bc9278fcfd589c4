"""Starts `vllm serve` for a run, with the flags the run needs and those of the user."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from whet.config import LocalTrainerConfig, VLLMConfig
from whet.errors import ConfigError
from whet.io.process import find_free_port

STOP_TIMEOUT_S = 30.0
GPU = Path("/dev/nvidiactl")
"""Exists where there is an NVIDIA GPU."""

ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
"""Variables that let vLLM load adapters and weights while it runs."""


class VLLMProcess:
    """A `vllm serve` process that is restarted when it dies."""

    def __init__(
        self,
        model: Path,
        config: VLLMConfig,
        flags: Sequence[str],
        *,
        log: Path,
        gpus: Sequence[str] = (),
        scratch: Path | None = None,
    ) -> None:
        """`flags` are the run's; those that the user set in the config take precedence.

        It sees these `gpus` alone, if there are any. The folder `scratch` is deleted with it, even
        if this process is killed.

        Raises:
            ConfigError: the program is missing.
        """
        program = shutil.which(config.command)
        if program is None:
            raise ConfigError(
                f"there is no program {config.command!r}: install vLLM in an environment of its "
                "own and name its program by engine.command, or use running servers by "
                "engine.urls"
            )
        host, port = _parse_address(config.flags)
        self.url = f"http://{host}:{port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._deaths: list[str] = []
        self._ready = False
        command = [program, "serve", str(model), *_drop_flags(flags, config.flags)]
        command += _drop_flags(["--host", host, "--port", str(port)], config.flags)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        self._watchdog = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "whet.engines.remote.watchdog",
                str(log),
                str(scratch or ""),
                *command,
                *config.flags,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ENVIRONMENT | visible,
            start_new_session=True,  # Ctrl-C reaches this process only, which then stops it
        )
        threading.Thread(target=self._listen, name="whet-vllm", daemon=True).start()

    def find_startup_error(self) -> str | None:
        """The reason why it will not become ready: it died before it was ready once."""
        if self._ready or not (self._deaths or self._watchdog.poll() is not None):
            return None
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        output = " | ".join(line.strip() for line in lines if line.strip()[:1] not in ("", "^"))
        return f"`vllm serve` ended at once; {self.log} ends with: {output[-400:]}"

    def mark_ready(self) -> None:
        """Record that it answered: from now on a death is not a startup error."""
        self._ready = True

    def close(self) -> None:
        """Stop it with all its child processes. Idempotent."""
        if self._watchdog.stdin is not None:
            self._watchdog.stdin.close()
        try:
            self._watchdog.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()

    def _listen(self) -> None:
        assert self._watchdog.stdout is not None
        with self._watchdog.stdout as output:
            for line in output:
                self._deaths.append(line.decode().strip())


def build_required_flags(
    trainer: LocalTrainerConfig, *, max_context: int | None, max_versions: int
) -> list[str]:
    """Flags of `vllm serve` for a run: exact log-probabilities, llguidance grammars, adapters."""
    flags = ["--logprobs-mode", "processed_logprobs", "--dtype", _read_dtype(trainer.precision)]
    flags += ["--structured-outputs-config", '{"backend": "guidance"}']
    if max_context is not None:
        flags += ["--max-model-len", str(max_context)]
    if trainer.weights == "lora":
        flags += ["--enable-lora", "--max-lora-rank", str(_rank(trainer.lora_rank))]
        flags += ["--max-loras", str(max_versions), "--max-cpu-loras", str(max_versions + 1)]
    return flags


def _read_dtype(precision: Literal["auto", "fp32", "bf16"]) -> str:
    """The trainer's precision; `auto` is resolved as the trainer does."""
    if precision == "auto":
        precision = "bf16" if GPU.exists() else "fp32"
    return {"fp32": "float32", "bf16": "bfloat16"}[precision]


def _rank(rank: int) -> int:
    """Round up to a LoRA rank that vLLM has kernels for."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def _drop_flags(flags: Sequence[str], user_flags: Sequence[str]) -> list[str]:
    """Our flags with their values, except those the user has set."""
    theirs = {flag.partition("=")[0] for flag in user_flags if flag.startswith("--")}
    kept: list[str] = []
    for at, flag in enumerate(flags):
        if flag.startswith("--"):
            value = [f for f in flags[at + 1 : at + 2] if not f.startswith("--")]
            kept += [] if flag in theirs else [flag, *value]
    return kept


def _parse_address(flags: Sequence[str]) -> tuple[str, int]:
    """Host and port from the user's flags, else a free local port."""
    values = dict(pairwise(flags))
    values |= dict(flag.split("=", 1) for flag in flags if flag.startswith("--") and "=" in flag)
    host = values.get("--host", "127.0.0.1")
    if "--port" in values:
        return host, int(values["--port"])
    return host, find_free_port()
