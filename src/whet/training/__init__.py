"""The training loops: collect rollouts, assign credit, build rows, update the policy."""
