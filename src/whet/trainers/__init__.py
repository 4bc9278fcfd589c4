"""Trainers: change the weights of a policy."""
