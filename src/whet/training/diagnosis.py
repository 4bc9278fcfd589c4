"""Diagnosis of groups without a learning signal: their likely causes, counted and explained."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

from whet.config import RunConfig
from whet.types import Generation, Group, Metrics, Trajectory


class Cause(StrEnum):
    """Likely reason why a group has no learning signal, or a generation is not trained."""

    FAILED = "failed"
    SINGLE = "single"
    NO_CALLS = "no_calls"
    TEMPERATURE = "temperature"
    SEED = "seed"
    GRAMMAR = "grammar"
    EQUAL_ANSWERS = "equal_answers"
    EQUAL_REWARDS = "equal_rewards"
    NO_CREDIT = "no_credit"


EXPLANATIONS: Mapping[Cause, str] = {
    Cause.FAILED: "all rollouts of a task failed: read the error of one",
    Cause.SINGLE: "all but one rollout of a task failed, so there is nothing to compare it with: "
    "read the error of one",
    Cause.NO_CALLS: "rollouts made no model call: give the agent's client base_url=llm.base_url "
    "and api_key=llm.api_key, and turn off its cache",
    Cause.TEMPERATURE: "all answers of a task are equal, because the agent samples at temperature "
    "0: leave temperature out of its requests, or set runner.temperature to 1",
    Cause.SEED: "all answers of a task are equal, because all its rollouts sample with the same "
    "seed: leave seed out of the agent's requests",
    Cause.GRAMMAR: "all answers of a task are equal, and constrained by a JSON schema or a forced "
    "tool call, which is not trained: let the model answer freely",
    Cause.EQUAL_ANSWERS: "all answers of a task are equal, though sampled: raise "
    "runner.temperature, or choose harder tasks",
    Cause.EQUAL_REWARDS: "all rewards of a task are equal, though its answers differ: the reward "
    "is constant, or the task too easy or too hard; give partial rewards, or raise group_size",
    Cause.NO_CREDIT: "the algorithm gave no credit, though the rewards of a task differ",
}


def find_cause(group: Group, config: RunConfig) -> Cause:
    """Return the likely cause why a group has no learning signal."""
    if not group:
        return Cause.FAILED
    if not any(trajectory.calls for trajectory in group):
        return Cause.NO_CALLS
    if (cause := find_equal_answers(group)) is not None:
        return cause
    rewards = [_list_rewards(trajectory, config.algorithm.logged_keys) for trajectory in group]
    if any(each != rewards[0] for each in rewards):
        return Cause.NO_CREDIT
    return Cause.SINGLE if len(group) == 1 < config.group_size else Cause.EQUAL_REWARDS


def find_equal_answers(group: Group) -> Cause | None:
    """Return the likely cause why all rollouts of a group sampled the same tokens, if they did."""
    sampled = [_list_generations(trajectory) for trajectory in group]
    answers = {tuple(each.tokens for each in generations) for generations in sampled}
    if len(group) < 2 or len(answers) > 1 or not sampled[0]:
        return None
    settings = [each.sampling for generations in sampled for each in generations]
    if all(sampling.grammar is not None for sampling in settings):
        return Cause.GRAMMAR
    if any(sampling.temperature == 0 for sampling in settings):
        return Cause.TEMPERATURE
    seeds = {tuple(each.sampling.seed for each in generations) for generations in sampled}
    if len(seeds) == 1 and None not in seeds.pop():
        return Cause.SEED
    return Cause.EQUAL_ANSWERS


def count_causes(groups: Sequence[Group], config: RunConfig) -> Counter[Cause]:
    """Count the likely causes of groups without a learning signal."""
    return Counter(find_cause(group, config) for group in groups)


def explain_causes(causes: Mapping[Cause, int]) -> list[str]:
    """Return one line for each cause, the most frequent first."""
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    return [f"{count} x {EXPLANATIONS[cause]}" for cause, count in ordered]


def build_cause_metrics(causes: Mapping[Cause, int]) -> dict[str, float]:
    """Return the metrics of a step that keep its causes."""
    return {f"no_signal/{cause}": count for cause, count in causes.items()}


def explain_metrics(steps: Sequence[Metrics]) -> str:
    """Return why groups of these steps, and generations with credit, were not trained."""
    totals = Counter[str]()
    for metrics in steps:
        totals.update(metrics)
    causes = {cause: round(totals[f"no_signal/{cause}"]) for cause in Cause}
    lines = explain_causes({cause: count for cause, count in causes.items() if count})
    if constrained := round(totals["constrained_generations"]):
        lines.append(
            f"{constrained} x an answer was constrained by a JSON schema or a forced tool call, "
            "which is not trained: let the model answer freely"
        )
    if unselected := round(totals["unselected_generations"]):
        lines.append(
            f"{unselected} x an answer is of a call that `selection` leaves out: an agent is named "
            "by the header x-whet-agent"
        )
    if masked := round(totals["masked_generations"]):
        lines.append(
            f"{masked} x an answer was cut off, or one of its rollout, and length.truncated masks "
            "it: raise max_tokens in the agent's requests"
        )
    if unproven := round(totals["unproven_generations"]):
        lines.append(f"{unproven} x the context of an answer does not match the served prompt")
    return "; ".join(lines) or "no generation with credit can be trained"


def _list_generations(trajectory: Trajectory) -> list[Generation]:
    return [generation for call in trajectory.calls for generation in call.generations]


def _list_rewards(trajectory: Trajectory, logged_keys: Sequence[str]) -> tuple[object, ...]:
    """The reward of a trajectory, and those beside it that are not only logged."""

    beside = (
        (reward.key, reward.value, str(reward.target))
        for reward in trajectory.rewards
        if not (reward.is_own or reward.is_of_judge or reward.key in logged_keys)
    )
    return trajectory.reward, *beside
