"""Parsers of model output: tool calls and thinking, in the formats of the model families."""
