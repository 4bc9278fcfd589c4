"""Fixtures of the gateway's tests; the gateway is in `support/gateway/scripted_gateway.py`."""

from support.gateway.scripted_gateway import gateway, new_gateway, renderer, thinking_renderer

__all__ = ["gateway", "new_gateway", "renderer", "thinking_renderer"]
