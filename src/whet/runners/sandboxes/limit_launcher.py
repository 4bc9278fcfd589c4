"""Program that joins control groups, sets limits, and becomes the command.

`python limit_launcher.py '{"groups": [...], "limits": {...}, "pid": FILE}' COMMAND...`. It imports
nothing but the standard library, since it starts once for each attempt.
"""

import json
import os
import resource
import sys


def main() -> None:
    """Apply the settings of the first argument, and replace this process by the rest."""
    settings = json.loads(sys.argv[1])
    for file in settings["groups"]:
        with open(file, "w") as group:
            group.write(str(os.getpid()))
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    with open(settings["pid"], "w") as file:
        file.write(str(os.getpid()))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
