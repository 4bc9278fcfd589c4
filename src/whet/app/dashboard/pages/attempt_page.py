"""Pages about one rollout: its attempts, conversation, tokens, spans, rewards and advantages."""

from collections.abc import Sequence
from itertools import groupby

from anyio import to_thread

from whet.app.dashboard.pages.token_texts import Vocabularies, split_text
from whet.app.dashboard.run_catalog import OpenedRun, read_config
from whet.app.inspection.span_links import link_spans
from whet.config import RunConfig
from whet.gateway.templates.chat_template import ChatTemplate
from whet.store.queries import browse, rollout_pages
from whet.training.rows import build_rows
from whet.training.selection import explain_exclusions, select
from whet.training.shaping import find_truncated, mask_truncated
from whet.types import AttemptRecord, Call, Credit, Fork, Generation, Span

FORK_CAUSES = {
    Fork.NEW_CONVERSATION: "a prompt with another beginning: a sub-agent or a side call",
    Fork.RESAMPLED: "the same prompt again",
    Fork.BRANCH: "a turn that was continued before is continued differently",
    Fork.OTHER_TOOLS: "the same messages with other tools or another model name",
    Fork.EDITED_HISTORY: "an earlier turn was changed, omitted or summarized",
    Fork.THINKING_DROPPED: "the chat template drops earlier thinking from this turn on",
    Fork.TEMPLATE: "the chat template cannot continue this turn",
}
"""Explanation of each cause of a fork."""

Templates = dict[str, ChatTemplate | None]
"""By policy; None for one whose tokenizer is not on this machine."""


class AttemptPages:
    """Reads rollouts and attempts of runs, and keeps the tokenizers it has loaded."""

    def __init__(self) -> None:
        self.vocabularies = Vocabularies()

    async def read_rollout(self, run: OpenedRun, id: str) -> dict[str, object]:
        """Return a rollout with its attempts. Raises NotFound."""
        attempts = await run.store.attempts(id)
        row = await run.store.browse(rollout_pages.read_rollout, id)
        return {
            "rollout": row._asdict() | {"step": None if row.step is None else row.step + 1},
            "attempts": [_format_attempt(record) for record in attempts],
        }

    async def read_attempt(self, run: OpenedRun, id: str) -> dict[str, object]:
        """Return everything that was recorded of an attempt, with tokens. Raises NotFound."""
        rollout = await run.store.browse(browse.read_rollout_id, id)
        records = await run.store.attempts(rollout)
        record = next(record for record in records if record.id == id)
        calls = await run.store.calls(record.id)
        spans = await run.store.spans(record.id)
        config = read_config(run)
        models = {name: own.model or config.model for name, own in config.policies.items()}
        templates: Templates = {}
        for policy in {call.origin.policy for call in calls}:
            model = models.get(policy, config.model)
            templates[policy] = await to_thread.run_sync(self.vocabularies.find, model)
        found = [template for template in templates.values() if template is not None]
        shown = await to_thread.run_sync(_format_calls, calls, templates)
        return {
            "attempt": _format_attempt(record),
            "rollout": rollout,
            "calls": shown,
            "special": sorted({id for template in found for id in template.special_tokens}),
            "rewards": [r.model_dump(mode="json") for r in await run.store.rewards(record.id)],
            "spans": _format_spans(spans, calls),
            "texts": bool(found),
        }

    async def read_credit(self, run: OpenedRun, id: str) -> dict[str, object]:
        """Return advantages, trained tokens and reasons of an attempt. Raises NotFound."""
        rollout = await run.store.browse(browse.read_rollout_id, id)
        row = await run.store.browse(rollout_pages.read_rollout, rollout)
        if row.step is None:
            return _explain_no_credit("no step has trained this rollout yet")
        read = await run.store.trajectories([rollout], failed=True)
        if not read or read[0].attempt.id != id:
            return _explain_no_credit("another attempt of the rollout was trained")
        known = set(read[0].generation_ids())
        advantages = await run.store.advantages(row.step)
        credit = Credit(read[0], {key: value for key, value in advantages.items() if key in known})
        if not credit.advantages:
            return _explain_no_credit(
                "the step gave it no credit, such as in a group of equal rewards"
            )
        found = run.folder.read_log_ratios(row.step) if run.folder else {}
        log_ratios = {id: values for id, values in found.items() if id in known}
        return _format_credit(credit, read_config(run)) | {"log_ratios": log_ratios}


def _format_credit(credit: Credit, config: RunConfig) -> dict[str, object]:
    """Return what was trained of an attempt, and reasons for the rest, decided as in training."""
    kept = mask_truncated(select([credit], config.selection), config.length)
    built = build_rows(kept)
    trained = {segment.generation for row in built.rows for segment in row.segments}
    reasons = dict(explain_exclusions(credit.trajectory.calls, config.selection))
    reasons |= dict.fromkeys(built.unproven, "unproven: the context is not what was served")
    reasons |= dict.fromkeys(built.constrained, "sampled under a grammar")
    if config.length.truncated != "train":
        cut = find_truncated(credit.trajectory) - trained
        reasons |= dict.fromkeys(cut, "truncated, masked by length.truncated")
    return {
        "reason": None,
        "advantages": dict(credit.advantages),
        "trained": sorted(trained),
        "unselected": reasons,
        "rows": [
            {
                "tokens": len(row.tokens),
                "trained_tokens": row.trained_tokens,
                "generations": [segment.generation for segment in row.segments],
            }
            for row in built.rows
        ],
    }


def _explain_no_credit(reason: str) -> dict[str, object]:
    lists: dict[str, object] = {"trained": [], "rows": []}
    return {"reason": reason, "advantages": {}, "unselected": {}, "log_ratios": {}, **lists}


def _format_attempt(record: AttemptRecord) -> dict[str, object]:
    return record.model_dump(mode="json")


def _format_calls(calls: Sequence[Call], templates: Templates) -> list[dict[str, object]]:
    """Return the calls in order, each with the texts of its tokens."""
    endings: dict[str, tuple[int, ...]] = {}
    """The last tokens of each generation, which may begin a character."""
    shown: list[dict[str, object]] = []
    for call in calls:
        template = templates[call.origin.policy]
        before = endings.get(call.parent or "", ())
        texts = _split_texts(call.prompt_suffix, before, template)
        generations: list[dict[str, object]] = []
        for index, generation in enumerate(call.generations):
            end = (*before, *call.prompt_suffix)[-4:]
            generations.append(_format_generation(generation, end, template))
            endings[call.generation_id(index)] = (*end, *generation.tokens)[-4:]
        origin = call.origin
        shown.append(
            {
                "id": call.id,
                "parent": call.parent,
                "messages": list(call.messages),
                "context": {"ids": call.prompt_suffix, "texts": texts},
                "prompt_length": call.prompt_length,
                "created": call.created,
                "dialect": origin.dialect,
                "model": origin.model,
                "agent": origin.agent,
                "policy": origin.policy,
                "tools": origin.tools,
                "fork": origin.fork,
                "cause": FORK_CAUSES[origin.fork] if origin.fork else None,
                "lossy": origin.lossy,
                "generations": generations,
            }
        )
    return shown


def _format_generation(
    generation: Generation, before: Sequence[int], template: ChatTemplate | None
) -> dict[str, object]:
    sampling = generation.sampling
    return {
        "message": generation.message,
        "stop": generation.stop,
        "ids": generation.tokens,
        "texts": _split_texts(generation.tokens, before, template),
        "logprobs": [round(value, 4) for value in generation.logprobs],
        "versions": [(v, len(list(run))) for v, run in groupby(generation.versions)],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "grammar": sampling.grammar is not None,
    }


def _split_texts(
    ids: Sequence[int], before: Sequence[int], template: ChatTemplate | None
) -> list[str] | None:
    if template is None:
        return None
    texts = split_text((*before, *ids), template.decode_all, template.byte_ids)
    return texts[len(before) :]


def _format_spans(spans: Sequence[Span], calls: Sequence[Call]) -> list[dict[str, object]]:
    """Return spans with times in milliseconds since the first, since nanoseconds exceed 2^53."""
    links = link_spans(spans, calls)
    begin = min((span.start for span in spans), default=0)
    return [
        {
            "id": span.span_id,
            "parent": span.parent_id,
            "name": span.name,
            "kind": span.kind,
            "start": (span.start - begin) / 1e6,
            "end": (span.end - begin) / 1e6,
            "status": span.status,
            "message": span.message,
            "scope": span.scope,
            "attributes": {key: str(value) for key, value in span.attributes.items()},
            "events": [
                {"name": e.name, "time": (e.time - begin) / 1e6, "attributes": e.attributes}
                for e in span.events
            ],
            "call": links[span.span_id].call if span.span_id in links else None,
        }
        for span in spans
    ]
