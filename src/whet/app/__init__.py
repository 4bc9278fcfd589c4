"""The composition root: where the parts meet, and what users start."""

import os

# Torch's threads wait for each other by spinning, which stops everything once anyone else wants
# the cores; agents do. It must be said before torch is imported, and the user may say otherwise.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
