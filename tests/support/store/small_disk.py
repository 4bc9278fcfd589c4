"""A small file system, which a test can fill."""

import subprocess
from pathlib import Path


def find_small_disk(folder: Path, size: str = "6m") -> list[str] | None:
    """Return a command prefix that mounts a small file system at a folder, if that is allowed."""
    mount = f'mount -t tmpfs -o size={size} none "{folder}" && exec "$@"'
    for unshare in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        command = [*unshare, "sh", "-c", mount, "sh"]
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return None
