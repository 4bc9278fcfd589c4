"""Placement of started servers on the GPUs of this machine."""

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from whet.errors import ConfigError

SIZES = {
    "--tensor-parallel-size": "-tp",
    "--pipeline-parallel-size": "-pp",
    "--data-parallel-size": "-dp",
}
"""Flags of `vllm serve` that multiply the GPUs of a server, and their short forms."""


def list_visible_gpus(
    environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> list[str]:
    """NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (listed := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    numbers = [file.name.removeprefix("nvidia") for file in devices.glob("nvidia[0-9]*")]
    return sorted(filter(str.isdigit, numbers), key=int)


def place_servers(
    gpus: Sequence[str], *, training: int | None, flags: Sequence[str], replicas: int | None
) -> list[tuple[str, ...]]:
    """The GPUs of each server to start; an empty one is given none in particular.

    The first `training` GPUs train; None if nothing is known of a trainer. Without `replicas` as
    many servers are started as the others hold, or one beside the trainer if there are no others.

    Raises:
        ConfigError: there are fewer GPUs than the replicas need.
    """
    if not gpus or (training is None and replicas is None):
        return [()] * (replicas or 1)
    left, each = list(gpus[training or 0 :]), count_gpus_per_server(flags)
    if replicas is None and len(left) < each:
        return [()]
    count = replicas or len(left) // each
    if len(left) < count * each:
        if count == 1:
            return [()]
        raise ConfigError(
            f"engine.replicas is {count} with {each} GPUs each, but trainer.gpus leaves "
            f"{len(left)} of {len(gpus)}: set engine.replicas to {max(1, len(left) // each)}"
        )
    return [tuple(left[n * each : (n + 1) * each]) for n in range(count)]


def count_gpus_per_server(flags: Sequence[str]) -> int:
    """GPUs that a server with these flags of the user needs."""
    values = dict(pairwise(flags))
    values |= dict(flag.split("=", 1) for flag in flags if flag.startswith("-") and "=" in flag)
    product = 1
    for long, short in SIZES.items():
        value = values.get(long, values.get(short, "1"))
        product *= int(value) if value.isdigit() else 1
    return max(1, product)
