"""Composition root: the parts meet here, and users start here."""

import os

# OpenMP threads of torch wait by spinning, which starves agents that share the cores. Set before
# torch is imported; the user's own setting is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
