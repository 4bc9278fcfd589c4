"""Sharpen any AI agent with reinforcement learning."""
