"""Agents and tasks to try whet with, written as a user would write them."""
