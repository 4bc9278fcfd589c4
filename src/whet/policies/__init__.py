"""Policies: the weights that the local engine samples from and the local trainer changes."""
