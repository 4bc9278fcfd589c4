"""Rows as verl reads them from its TransferQueue: keys, fields and tags."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from whet.types import Row

SEPARATOR = "_"
"""Between prompt, session and row in a key; verl splits keys there, so a uid has none."""


class SessionResult(NamedTuple):
    """A rollout of a prompt as verl counts it: its rows, and the reward that they share."""

    rows: Sequence[Row]
    reward: float
    turns: int
    """Model calls."""


class Entry(NamedTuple):
    """A row in TransferQueue."""

    key: str
    fields: dict[str, Any]  # Any: tensors, texts and plain values, as verl mixes them
    tag: dict[str, Any]


def build_entries(
    uid: str,
    session: int,
    result: SessionResult,
    prompt: Mapping[str, Any],
    *,
    global_steps: int,
    by_rollout: bool,
) -> list[Entry]:
    """Build the entries of one session.

    `prompt` has the columns of its dataset. With `by_rollout` the field `uid`, by which advantage
    estimators group rows, also names the session: those of the plugin need it.
    """
    assert SEPARATOR not in uid, f"verl would split the uid {uid!r}"
    name = f"{uid}{SEPARATOR}{session}"
    return [
        Entry(
            f"{name}{SEPARATOR}{index}",
            {
                **_build_tensors(row, result.reward),
                "uid": name if by_rollout else uid,
                "raw_prompt": prompt["raw_prompt"],
                "data_source": prompt["data_source"],
                "reward_model": prompt["reward_model"],
                "extra_fields": {"reward_extra_info": {}},
                "multi_modal_inputs": {},
                "num_turns": result.turns,
                "session_id": session,
                "global_steps": global_steps,
            },
            _build_tags(row, global_steps),
        )
        for index, row in enumerate(result.rows)
    ]


def _build_tensors(row: Row, reward: float) -> dict[str, torch.Tensor]:
    """The token fields: everything after the first prompt is verl's response."""
    start = row.segments[0].start
    length = len(row.tokens) - start
    mask, logprobs = torch.zeros(length, dtype=torch.int64), torch.zeros(length)
    for segment in row.segments:
        part = slice(segment.start - start, segment.end - start)
        mask[part] = 1
        logprobs[part] = torch.tensor(segment.logprobs)
    scores = torch.zeros(length)
    scores[-1] = reward  # a row ends with a sampled token
    tokens = torch.tensor(row.tokens)
    return {
        "prompts": tokens[:start],
        "responses": tokens[start:],
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(len(tokens)),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rollout_log_probs": logprobs,
        "rm_scores": scores,
    }


def _build_tags(row: Row, global_steps: int) -> dict[str, Any]:
    versions = [version for segment in row.segments for version in segment.versions]
    start = row.segments[0].start
    return {
        "status": "success",
        "prompt_len": start,
        "response_len": len(row.tokens) - start,
        "seq_len": len(row.tokens),
        "global_steps": global_steps,
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
    }
