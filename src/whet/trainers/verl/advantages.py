"""Advantages by rollout, and the loss that goes with them, as verl calls them.

An agent's rollout may be several rows. verl's own estimators take every row for a sample, and its
losses a mean over rows or tokens: a rollout with more rows would count more often, in the baseline
and in the gradient. Here a rollout is one sample, and the tokens of all its rows share a weight of
one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from whet.trainers.verl.entries import SEPARATOR

EPSILON = 1e-6

Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
AdvantageFunction = Callable[[torch.Tensor, Sequence[str], Any], torch.Tensor]
"""Advantages of rollouts from their rewards, the prompts they belong to, and verl's config."""


def build_estimator(compute_advantages: AdvantageFunction) -> Estimator:
    """An advantage estimator of verl that treats each rollout as one sample."""

    def estimate(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        config: Any = None,
        index: Sequence[str] = (),
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            mask = response_mask.to(torch.float32)
            sums, tokens = token_level_rewards.sum(dim=-1), mask.sum(dim=-1)
            # Rows that pad a batch have no sampled tokens: they are of no rollout.
            real = [row for row in range(len(index)) if tokens[row] > 0]
            if not real:
                return torch.zeros_like(mask), torch.zeros_like(mask)
            names = list(dict.fromkeys(str(index[row]) for row in real))
            positions = {name: position for position, name in enumerate(names)}
            rewards, lengths = torch.zeros(len(names)), torch.zeros(len(names))
            for row in real:
                position = positions[str(index[row])]
                rewards[position] = sums[row]  # all rows of a rollout carry its reward
                lengths[position] += tokens[row]
            values = compute_advantages(
                rewards, [name.rpartition(SEPARATOR)[0] for name in names], config
            )
            advantages = torch.zeros_like(mask)
            for row in real:
                position = positions[str(index[row])]
                advantages[row] = values[position] / lengths[position]
            return advantages * mask, sums.unsqueeze(-1) * mask

    return estimate


def grpo(rewards: torch.Tensor, prompts: Sequence[str], config: Any) -> torch.Tensor:
    """Reward minus the mean of the prompt's rollouts, divided by their deviation if verl is set to.

    A prompt with one rollout has nothing to compare with: its advantage is 0.
    """
    advantages = rewards - _group_means(rewards, prompts)
    if config is not None and config.get("norm_adv_by_std_in_grpo", True):
        deviations = [
            rewards[positions].std() if len(positions) > 1 else rewards.new_zeros(())
            for positions in _find_positions(prompts)
        ]
        advantages = advantages / (torch.stack(deviations) + EPSILON)
    return advantages


def rloo(rewards: torch.Tensor, prompts: Sequence[str], config: Any) -> torch.Tensor:
    """Reward minus the mean of the prompt's other rollouts."""
    sizes = torch.tensor([float(len(positions)) for positions in _find_positions(prompts)])
    scale = torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), torch.zeros_like(sizes))
    return (rewards - _group_means(rewards, prompts)) * scale


def reinforce_plus_plus(rewards: torch.Tensor, prompts: Sequence[str], config: Any) -> torch.Tensor:
    """Reward normalized over all rollouts of the batch."""
    if len(rewards) < 2:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + EPSILON)


def _find_positions(prompts: Sequence[str]) -> list[list[int]]:
    """For each rollout, the positions of all rollouts of its prompt."""
    groups: dict[str, list[int]] = {}
    for position, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(position)
    return [groups[prompt] for prompt in prompts]


def _group_means(rewards: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return torch.stack([rewards[positions].mean() for positions in _find_positions(prompts)])


def build_loss(clipped: Callable[..., tuple[torch.Tensor, dict[str, Any]]]) -> Callable[..., Any]:
    """A policy loss of verl: its clipped one, summed over tokens whose advantages have weights.

    The sum is divided by the rollouts of a mini-batch. Entropy and KL terms keep the aggregation of
    verl's config.
    """

    def rollout_loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        return clipped(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            loss_agg_mode="seq-mean-token-sum",
            config=config,
            rollout_is_weights=rollout_is_weights,
        )

    return rollout_loss
