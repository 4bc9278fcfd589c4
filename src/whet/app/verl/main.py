"""verl's process: `python -m whet.app.verl.main SETTINGS [--check]`, in verl's environment.

verl's own entry point runs with its own config: our manager is a key of it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from whet.errors import WhetError
from whet.io.process import follow_supervisor
from whet.trainers.verl.version import check_version


def main(arguments: Sequence[str]) -> int:
    """Check the settings of a file, and train with them unless that is all."""
    follow_supervisor()
    settings, *flags = arguments
    try:
        check_version()
        from whet.trainers.verl.launch import build_config, launch  # noqa: PLC0415 - imports verl

        config = build_config(json.loads(Path(settings).read_text()))
        if "--check" not in flags:
            launch(config)
    except WhetError as error:
        sys.stderr.write(f"whet: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
