"""Model cards: a README.md in the folder of a trained model that says what it was trained on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from whet.config import RunConfig
from whet.io.files import atomic_file
from whet.io.text import format_count

CARD = """---
base_model: {base}
library_name: {library}
pipeline_tag: text-generation
tags: [whet, {kind}]
---

# {name}

{summary}

{results}
## Use

```sh
whet chat {run}
whet serve --model {run}
```

`whet models merge {run} FOLDER` writes an adapter and its base model as one folder.

## Settings

```json
{settings}
```
"""

Measures = Mapping[str, float | None]
"""Means of held-out measures; None where every rollout failed."""

FAILED = "failed"
"""Number of failed held-out rollouts among the measures."""

KINDS = {
    "sft": "imitation of dialogues or rollouts",
    "dpo": "preference pairs (DPO)",
}


def write_card(
    folder: Path,
    run: Path,
    kind: str,
    config: RunConfig,
    report: Mapping[str, object],
    *,
    policy: str = "",
) -> None:
    """Write the card of the model in a folder, from the config and the final numbers of its run.

    The numbers are those of all policies together, if it is one of several.
    """
    library = "peft" if (folder / "adapter_config.json").exists() else "transformers"
    changed = config.model_dump(mode="json", exclude_defaults=True, exclude={"dir", "name"})
    text = CARD.format(
        base=config.model,
        library=library,
        kind=kind,
        name=run.name,
        run=run,
        summary=_summarize(kind, config, report, policy),
        results=_describe_results(report),
        settings=json.dumps(changed, indent=2),
    )
    with atomic_file(folder / "README.md") as file:
        file.write_text(text)


def _summarize(kind: str, config: RunConfig, report: Mapping[str, object], policy: str) -> str:
    what = "an adapter of" if config.trainer.kind == "tinker" else "full weights of"
    if config.trainer.kind == "local" and config.trainer.weights == "lora":
        what = "a LoRA adapter of"
    how = KINDS.get(kind)
    if how is None:
        rollouts, tasks = (cast(int, report.get(key, 0)) for key in ("rollouts", "tasks"))
        how = f"reinforcement learning ({config.algorithm.name}, loss {config.loss.name}, "
        how += format_count(rollouts, "rollout")
        how += f"; {format_count(tasks, 'held-out task')})" if tasks else ")"
    role = f" It is the policy {policy!r} of several that were trained together." if policy else ""
    # The step whose weights were kept, if an evaluation chose it.
    steps = format_count(cast(int, report.get("model_step") or report.get("steps", 0)), "step")
    lines = [f"Trained with whet: {what} `{config.model}` after {steps} of {how}.{role}", ""]
    if agent := report.get("agent"):
        lines.append(f"- Agent: `{agent}`")
    if trained_on := report.get("trained_on"):
        lines.append(f"- Trained on: {trained_on}")
    return "\n".join([*lines, f"- Seed: {config.seed}"])


def _describe_results(report: Mapping[str, object]) -> str:
    """A table of the measures before and after training; nothing was measured without held-out."""
    before, after = (cast(Measures | None, report.get(key)) for key in ("before", "after"))
    if not before or not after:
        return ""
    pairs = [(name, before.get(name), value) for name, value in after.items() if name != FAILED]
    rows = [
        f"| {name} | {_format(was)} | {_format(now)} | {_subtract(now, was)} |"
        for name, was, now in pairs
    ]
    lines = ["| held out | before | after | gain |", "|---|---|---|---|", *rows, ""]
    if before.get(FAILED) or after.get(FAILED):
        failed = [
            f"{_format(each.get(FAILED))} {when}"
            for each, when in ((before, "before"), (after, "after"))
        ]
        lines += [f"Failed held-out rollouts: {', '.join(failed)}.", ""]
    if interval := cast(list[float] | None, report.get("gain_ci95")):
        low, high = interval
        lines += [f"Gain of the first measure, 95 % interval: {low:+.3f} to {high:+.3f}.", ""]
    return "\n".join(lines)


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _subtract(value: float | None, before: float | None) -> str:
    return "-" if value is None or before is None else f"{value - before:+.4g}"
