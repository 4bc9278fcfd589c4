"""Engines: sample tokens from a policy."""
