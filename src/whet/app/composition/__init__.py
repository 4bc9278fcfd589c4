"""A run put together from its parts: stores, engines, gateways, trainers and drivers."""
