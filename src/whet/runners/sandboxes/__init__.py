"""Sandboxes: commands of attempts, each in a folder of its own and with limits.

`sandbox.py` has the protocol, `local.py` plain processes and bubblewrap, `containers.py` docker and
podman, `control_groups.py` the limits of the kernel. `limit_launcher.py` and `relay.py` are small
programs that run on the other side.
"""

from whet.errors import ConfigError
from whet.runners.sandboxes.containers import ContainerSandbox
from whet.runners.sandboxes.local import BubblewrapSandbox, SubprocessSandbox
from whet.runners.sandboxes.sandbox import Sandbox, SandboxLimits


def choose_sandbox(text: str) -> Sandbox:
    """Return the sandbox of `NAME[:IMAGE][,memory_mb=N,processes=N,disk_mb=N]`, checked.

    Raises:
        ConfigError: the name or a limit is unknown, or this system cannot run it.
    """
    name, *rest = text.split(",")
    limits = _parse_limits(rest)
    program, _, image = name.partition(":")
    if name == "subprocess":
        sandbox = SubprocessSandbox(limits)
    elif name == "bubblewrap":
        sandbox = BubblewrapSandbox(limits)
    elif program in ("docker", "podman") and image:
        sandbox = ContainerSandbox(program, image, limits)
    else:
        raise ConfigError(
            f"unknown sandbox {name!r}: expected subprocess, bubblewrap, docker:IMAGE or "
            "podman:IMAGE"
        )
    sandbox.check()
    return sandbox


def _parse_limits(parts: list[str]) -> SandboxLimits:
    found: dict[str, int] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in SandboxLimits.__slots__ or not value.isdecimal():
            raise ConfigError(
                f"invalid limit {part!r}: expected {', '.join(SandboxLimits.__slots__)} with a "
                "whole number"
            )
        found[key] = int(value)
    return SandboxLimits(**found)
