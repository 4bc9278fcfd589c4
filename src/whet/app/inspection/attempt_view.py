"""A finished attempt with its calls, spans and rewards: as JSON, and as a tree for the terminal."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import JsonValue
from rich.text import Text
from rich.tree import Tree

from whet.app.inspection.span_links import SpanLink, link_spans
from whet.io.genai_spans import find_refusals
from whet.io.text import escape_lines, format_count
from whet.protocols import Store
from whet.runners.diagnostics import CLIENT_ERROR, CLIENT_HINT
from whet.types import (
    NO_ADVANTAGES,
    AttemptRecord,
    Call,
    Generation,
    GenerationId,
    Mode,
    Reward,
    Rollout,
    Span,
)

Advantages = Mapping[GenerationId, float]
"""Mean advantages by generation."""

WIDTH = 160
"""Characters of a text that the tree shows."""


@dataclass(frozen=True, slots=True)
class AttemptView:
    """An attempt with everything that was recorded of it."""

    rollout: Rollout
    record: AttemptRecord
    calls: tuple[Call, ...]
    spans: tuple[Span, ...]
    rewards: tuple[Reward, ...]
    """Empty unless the attempt succeeded."""
    earlier: tuple[AttemptRecord, ...]
    """Attempts of the rollout before this one."""

    @property
    def seconds(self) -> float:
        """Duration of the attempt."""
        return (self.record.ended or self.record.started) - self.record.started

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all calls."""
        return sum(call.prompt_length for call in self.calls)

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens of all calls."""
        return sum(len(g.tokens) for call in self.calls for g in call.generations)

    @property
    def generation_ids(self) -> list[GenerationId]:
        """Ids of all generations, in the order of their calls."""
        return [id for call in self.calls for id in call.generations_by_id]

    @property
    def links(self) -> dict[str, SpanLink]:
        """The call of each span that has one, by span id."""
        return link_spans(self.spans, self.calls)

    def as_json(self) -> dict[str, object]:
        """Everything except the token ids, which are in the store."""
        failure, links = self.record.failure, self.links
        return {
            "attempt": self.record.id,
            "task": self.rollout.task,
            "seconds": round(self.seconds, 3),
            "reward": self.record.reward,
            "failure": failure.model_dump(mode="json") if failure else None,
            "earlier_failures": [
                attempt.failure.model_dump(mode="json")
                for attempt in self.earlier
                if attempt.failure
            ],
            "prompt_tokens": self.prompt_tokens,
            "sampled_tokens": self.sampled_tokens,
            "calls": [_dump_call(call) for call in self.calls],
            "rewards": [reward.model_dump(mode="json") for reward in self.rewards],
            "spans": [
                span.model_dump(mode="json") | _dump_link(links.get(span.span_id))
                for span in self.spans
            ],
        }


async def read_attempt(store: Store, rollout: Rollout) -> AttemptView:
    """Read the last attempt of a rollout, with everything that was recorded of it."""
    *earlier, record = await store.attempts(rollout.id)
    trajectories = await store.trajectories([rollout.id])
    return AttemptView(
        rollout=rollout,
        record=record,
        calls=tuple(await store.calls(record.id)),
        spans=tuple(await store.spans(record.id)),
        rewards=trajectories[0].rewards if trajectories else (),
        earlier=tuple(earlier),
    )


def _dump_link(link: SpanLink | None) -> dict[str, str | None]:
    return {"call": link and link.call, "call_by": link and link.by}


def _dump_call(call: Call) -> dict[str, JsonValue]:
    return {
        "id": call.id,
        "parent": call.parent,
        "dialect": call.origin.dialect,
        "model": call.origin.model,
        "policy": call.origin.policy,
        "agent": call.origin.agent,
        "tools": list(call.origin.tools),
        "fork": call.origin.fork.value if call.origin.fork else None,
        "omitted": [omission.value for omission in call.origin.omitted],
        "prompt_tokens": call.prompt_length,
        "new_prompt_tokens": len(call.prompt_suffix),
        "messages": [dict(message) for message in call.messages],
        "answers": [
            {
                "message": dict(generation.message),
                "sampled_tokens": len(generation.tokens),
                "stop": generation.stop,
            }
            for generation in call.generations
        ],
    }


# ------------------------------------------------------------------- the tree


def draw_attempt(view: AttemptView, advantages: Advantages = NO_ADVANTAGES) -> Tree:
    """Draw an attempt as a tree: its task, calls with advantages, spans and rewards."""
    tree = Tree(_format_head(view))
    tree.add(Text(f"task  {_shorten(view.rollout.task)}"))
    for attempt in view.earlier:
        if attempt.failure:
            reason = f"{attempt.failure.kind.value}: {attempt.failure.message}"
            tree.add(Text(f"attempt {attempt.number}  failed, {reason}", "yellow"))
    for number, call in enumerate(view.calls, start=1):
        branch = tree.add(_format_call(number, call))
        for line in _format_turn(call, view.rollout.mode, advantages):
            branch.add(line)
    if not view.calls and view.record.ended is not None:
        tree.add(Text(_explain_missing_calls(view), "yellow"))
    numbers = {call.id: number for number, call in enumerate(view.calls, start=1)}
    links = {span: f"call {numbers[link.call]} by {link.by}" for span, link in view.links.items()}
    below: dict[str | None, Tree] = {}
    for span in view.spans:
        shown = _format_span(span, links.get(span.span_id, ""))
        below[span.span_id] = below.get(span.parent_id, tree).add(shown)
    if view.record.failure and view.record.failure.traceback:
        tree.add(Text(view.record.failure.traceback.rstrip(), "red"))
    for reward in view.rewards:
        target = f" for {reward.target}" if reward.target else ""
        tree.add(Text(f"reward  {reward.key} = {reward.value:g}{target}"))
    _escape(tree)
    return tree


def _escape(tree: Tree) -> None:
    """Replace what would control the terminal: the texts are of models, agents and tools."""
    assert isinstance(tree.label, Text)
    tree.label.plain = escape_lines(tree.label.plain)  # as long as before
    for child in tree.children:
        _escape(child)


def _format_head(view: AttemptView) -> Text:
    head = Text(f"{view.record.id}  ", "bold")
    if view.record.failure:
        failure = view.record.failure
        head.append(f"failed, {failure.kind.value}: {failure.message}", "bold red")
    elif view.record.reward is None:
        head.append(view.record.status.value, "bold")
    else:
        style = "bold green" if view.record.reward else "bold"
        head.append(f"reward {view.record.reward:g}", style)
    calls = format_count(len(view.calls), "call")
    head.append(
        f"  {calls}, {view.prompt_tokens} prompt and {view.sampled_tokens} "
        f"sampled tokens, {view.seconds:.1f} s",
        "not bold",
    )
    return head


def _explain_missing_calls(view: AttemptView) -> str:
    if find_refusals(view.spans):  # whose spans have the reason
        return "the gateway refused every model call: there is nothing to train"
    text, failure = "no model call reached the gateway for this attempt", view.record.failure
    if failure is not None and not CLIENT_ERROR.search(failure.message):
        return text
    return (
        f"{text}: there is nothing to train; {CLIENT_HINT} (the gateway warns of a call without "
        "them, which gets a 401)"
    )


def _format_call(number: int, call: Call) -> Text:
    sampled = sum(len(generation.tokens) for generation in call.generations)
    line = Text(f"call {number}  ", "bold")
    policy, agent = call.origin.policy, call.origin.agent
    who = f", policy {policy}" if policy not in ("", call.origin.model) else ""
    who += f", agent {agent}" if agent else ""
    line.append(
        f"{call.origin.dialect}, {call.origin.model or 'policy'}{who}: prompt "
        f"{call.prompt_length} tokens ({len(call.prompt_suffix)} new), sampled {sampled}",
        "not bold",
    )
    if call.origin.fork:
        line.append(f"  fork: {call.origin.fork.value}", "yellow")
    if call.origin.omitted:
        line.append(f"  left out: {', '.join(call.origin.omitted)}", "yellow")
    return line


def _format_turn(call: Call, mode: Mode, advantages: Advantages) -> Iterator[Text]:
    """Format the new messages of a call, and its generations with their advantages."""
    for message in call.messages:
        yield Text(f"{message.get('role')}  {_shorten(message.get('content'))}", "dim")
    for index, generation in enumerate(call.generations):
        yield from _format_generation(generation, mode)
        advantage = advantages.get(call.generation_id(index))
        if advantage is not None:
            yield Text(f"advantage  {advantage:+.3f}", "green")


def _format_generation(generation: Generation, mode: Mode) -> Iterator[Text]:
    message = generation.message
    if message.get("reasoning"):
        yield Text(f"reasoning  {_shorten(message['reasoning'])}", "cyan")
    if message.get("content"):
        yield Text(f"reply  {_shorten(message['content'])}", "cyan")
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict):
            yield Text(
                f"tool call  {call.get('name')}({_shorten(call.get('arguments'))})", "magenta"
            )
    if generation.stop == "length":
        yield Text("cut off at the token limit", "yellow")
    if generation.sampling.grammar is not None:
        yield Text("constrained: never trained", "yellow")
    elif generation.sampling.temperature == 0 and mode is Mode.TRAIN:
        yield Text("sampled at temperature 0: the rollouts of a group would be equal", "yellow")


def _format_span(span: Span, link: str) -> Text:
    line = Text(f"span  {span.name}  {(span.end - span.start) / 1e6:.1f} ms")
    if link:
        line.append(f"  {link}", "bold")
    if span.status == "error":
        line.append(f"  {_shorten(span.message)}", "red")
    shown = {k: v for k, v in span.attributes.items() if not k.startswith("code.")}
    if shown and span.status != "error":
        line.append(f"  {_shorten(shown)}", "dim")
    return line


def _shorten(value: JsonValue) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else f"{line[:WIDTH]}…"
