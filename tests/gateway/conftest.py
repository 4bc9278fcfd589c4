"""Fixtures of the gateway's tests; the gateway itself is in `support/scripted_gateway.py`."""

from support.scripted_gateway import gateway, new_gateway, renderer, thinking_renderer

__all__ = ["gateway", "new_gateway", "renderer", "thinking_renderer"]
