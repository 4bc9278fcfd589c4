"""Runners: execute users' agents."""
