"""Durable truth: what is to be done, what happened, what was learned."""
