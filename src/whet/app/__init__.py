"""The composition root: where the parts meet, and what users start."""
