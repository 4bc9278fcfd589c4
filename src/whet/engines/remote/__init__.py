"""Engines over HTTP: vLLM and SGLang servers and their replicas."""
