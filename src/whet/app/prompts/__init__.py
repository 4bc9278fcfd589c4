"""Optimization of prompts on the rollouts, the store and the evaluation of training."""
