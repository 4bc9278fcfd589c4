"""Composition root: the parts meet here, and users start here."""

import logging
import os
import sys

# OpenMP threads of torch wait by spinning, which starves agents that share the cores. Set before
# torch is imported; the user's own setting is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class WarningHandler(logging.Handler):
    """Prints our warnings, as the command does, in a program that has not configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(f"{record.levelname.lower()}: {self.format(record)}\n")


logging.getLogger("whet").addHandler(WarningHandler(logging.WARNING))
