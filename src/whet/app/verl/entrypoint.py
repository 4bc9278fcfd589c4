"""verl's process: `python -m whet.app.verl.entrypoint SETTINGS [--check]`, in verl's environment.

verl's own entry point runs with its own config: our manager is a key of it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from whet.errors import WhetError
from whet.io.process import follow_supervisor
from whet.trainers.verl.version import check_names, check_version


def main(arguments: Sequence[str]) -> int:
    """Check the settings of a file, and train with them unless that is all."""
    follow_supervisor()
    settings, *flags = arguments
    try:
        check_version()
        # Hydra is of verl's environment, and verl takes long to import: a wrong key is found first.
        from whet.trainers.verl.hydra_config import compose_config  # noqa: PLC0415

        config = compose_config(json.loads(Path(settings).read_text()))
        check_names()
        from whet.trainers.verl.ppo_trainer import check_config, launch  # noqa: PLC0415

        check_config(config)
        if "--check" not in flags:
            launch(config)
    except WhetError as error:
        sys.stderr.write(f"whet: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
