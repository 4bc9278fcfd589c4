"""Composition of a run from its parts: stores, engines, gateways, trainers and drivers."""
