"""An attempt as a tree in the terminal: its calls, spans and rewards."""

import json
from collections.abc import Iterator

from pydantic import JsonValue
from rich.text import Text
from rich.tree import Tree

from whet.app.tried import Tried
from whet.types import Call, Generation, Span

WIDTH = 160
"""Characters of a text that are shown."""


def draw(tried: Tried) -> Tree:
    """All that is worth a look."""
    tree = Tree(_head(tried))
    tree.add(Text(f"task  {_short(tried.rollout.task)}"))
    for number, call in enumerate(tried.calls, start=1):
        branch = tree.add(_of_call(number, call))
        for message in call.messages:
            branch.add(Text(f"{message.get('role')}  {_short(message.get('content'))}", "dim"))
        for generation in call.generations:
            for line in _said(generation):
                branch.add(line)
    if not tried.calls:
        tree.add(Text("no model call reached the gateway: there is nothing to train", "yellow"))
    numbers = {call.id: number for number, call in enumerate(tried.calls, start=1)}
    joints = {
        span: f"call {numbers[joint.call]} by {joint.by}" for span, joint in tried.joints.items()
    }
    below: dict[str | None, Tree] = {}
    for span in tried.spans:
        shown = _of_span(span, joints.get(span.span_id, ""))
        below[span.span_id] = below.get(span.parent_id, tree).add(shown)
    for reward in tried.rewards:
        target = f" for {reward.target}" if reward.target else ""
        tree.add(Text(f"reward  {reward.key} = {reward.value:g}{target}"))
    return tree


def _head(tried: Tried) -> Text:
    head = Text(f"{tried.record.id}  ", "bold")
    if tried.record.failure:
        failure = tried.record.failure
        head.append(f"failed, {failure.kind.value}: {failure.message}", "bold red")
    else:
        head.append(f"reward {tried.record.reward:g}", "bold green")
    head.append(
        f"  {len(tried.calls)} calls, {tried.prompt_tokens} prompt and {tried.sampled_tokens} "
        f"sampled tokens, {tried.seconds:.1f} s",
        "not bold",
    )
    return head


def _of_call(number: int, call: Call) -> Text:
    sampled = sum(len(generation.tokens) for generation in call.generations)
    line = Text(f"call {number}  ", "bold")
    who = f", agent {call.origin.agent}" if call.origin.agent else ""
    line.append(
        f"{call.origin.dialect}, {call.origin.model or 'policy'}{who}: prompt "
        f"{call.prompt_length} tokens ({len(call.context)} new), sampled {sampled}",
        "not bold",
    )
    if call.origin.fork:
        line.append(f"  fork: {call.origin.fork.value}", "yellow")
    return line


def _said(generation: Generation) -> Iterator[Text]:
    message = generation.message
    if message.get("reasoning"):
        yield Text(f"thinks  {_short(message['reasoning'])}", "cyan")
    if message.get("content"):
        yield Text(f"says  {_short(message['content'])}", "cyan")
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict):
            yield Text(f"calls  {call.get('name')}({_short(call.get('arguments'))})", "magenta")
    if generation.stop == "length":
        yield Text("cut off at its limit of tokens", "yellow")


def _of_span(span: Span, about: str) -> Text:
    line = Text(f"span  {span.name}  {(span.end - span.start) / 1e6:.1f} ms")
    if about:
        line.append(f"  {about}", "bold")
    if span.status == "error":
        line.append(f"  {_short(span.message)}", "red")
    shown = {k: v for k, v in span.attributes.items() if not k.startswith("code.")}
    if shown and span.status != "error":
        line.append(f"  {_short(shown)}", "dim")
    return line


def _short(value: JsonValue) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else f"{line[:WIDTH]}…"
