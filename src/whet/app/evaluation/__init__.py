"""Compare models on held-out tasks."""
