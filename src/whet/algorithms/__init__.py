"""Algorithms: give credit. One file each, no torch."""
