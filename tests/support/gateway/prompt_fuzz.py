"""Random dialogues through the gateway, each prompt compared with `apply_chat_template`.

    PYTHONPATH=tests python -m support.gateway.prompt_fuzz --continuations 100000 [--seed 1]
        [NAME ...]

The prompt of a call must be what the template writes for its conversation, up to sampled turns. The
dialogues have histories from the client, late system messages, truncated turns, several results in
any order, thinking, and echoes that were edited or lost their thinking.
"""

import argparse
import json
import logging
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

import anyio
from pydantic import JsonValue

from support.models.real_templates import all_templates, template_of
from whet.engines.fake import FakeEngine
from whet.errors import RequestError
from whet.gateway.graph import Graph, Turn
from whet.gateway.messages import Message, ToolCall
from whet.gateway.pipeline import CallPipeline, Log
from whet.gateway.requests import ModelRequest, PreparedCall, RequestSource
from whet.gateway.templates.renderer import Renderer
from whet.types import AttemptId, Call, Generation, Sampling, digest_tokens

TOOLS: tuple[JsonValue, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name}.",
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        },
    }
    for name, key in (("calculator", "expression"), ("get_weather", "city"))
)
PLAIN = ("hi", "What is 2 + 3?", "go on", "ok", "It is 5.")
ODD = (
    *("Zürich 東京 🙂", " \n x \n\n", "", "é", "/no_think", "/think", '{"a": 1}', "<b>&</b>", "0"),
    *("None", "true", "null", "<think>\nx\n</think>\n\ny", "</think>", "user", "<|im_end|>"),
)
THOUGHTS = ("I think.", "Hm\nhm", "First this, then that.")
LITERAL = re.compile(r"'((?:[^'\\\n]|\\.){1,60})'|\"((?:[^\"\\\n]|\\.){1,60})\"")


class TransformersTemplate:
    """`apply_chat_template` of transformers, over the same tokenizer."""

    def __init__(self, renderer: Renderer, folder: Path) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import PreTrainedTokenizerFast

        config = json.loads((folder / "tokenizer_config.json").read_text())
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), **config
        )
        self._template = renderer.template

    def render(self, messages: Sequence[Message], tools: Sequence[JsonValue]) -> str:
        converted = [
            self._template.message_format.convert(m) for m in self._template.arrange(messages)
        ]
        text = self._tokenizer.apply_chat_template(
            cast(list[dict[str, str]], converted),
            tools=cast(Any, list(tools)) or None,
            chat_template=self._template.source,
            add_generation_prompt=True,
            tokenize=False,
        )
        return str(text)

    def encode(self, text: str) -> list[int]:
        return cast(list[int], self._tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass
class PromptFuzz:
    """Random dialogues of one template."""

    name: str
    renderer: Renderer
    reference: TransformersTemplate
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter[str])
    """Calls by what became of them: continued, full, refused, and forks by their cause."""
    differences: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._numbers = count(1)
        found = LITERAL.findall(self.renderer.template.source)
        self._literals = sorted({(a or b).replace("\\n", "\n") for a, b in found}) or [""]
        self._thinks = self.renderer.report.reasoning != "none"
        self._pipeline = CallPipeline(
            engine=FakeEngine(),
            log=cast(Log, None),  # nothing is recorded: the calls have no attempt
            renderer=self.renderer,
            models=("m",),
        )

    async def run(self, continuations: int) -> None:
        """Make dialogues until so many calls were continued, or none is."""
        for number in count():
            if self.counts["continued"] >= continuations:
                return
            if number >= 20 and not self.counts["continued"]:
                return
            await self._run_dialogue()

    async def _run_dialogue(self) -> None:
        rng, graph = self.rng, Graph()
        tools = TOOLS if self.renderer.renders_tools and rng.random() < 0.6 else ()
        messages = self._begin(tools)
        for _ in range(rng.randint(2, 7)):
            try:
                call = await self._pipeline.render(
                    RequestSource(None, "chat", "m", "", "", is_retry=False, size=0),
                    ModelRequest(tuple(messages), tools=tools),
                    graph,
                )
            except RequestError:
                self.counts["refused"] += 1
                return
            self._check(call, graph, tools)
            turn = self._new_turn(tools)
            rest = self._new_rest(turn, tools)
            graph = self._record(graph, call, turn, rest)
            messages = [*self._echo(messages), self._echo([turn])[0], *rest]

    # ------------------------------------------------------------- dialogues

    def _text(self) -> str:
        rng = self.rng
        kind = rng.random()
        mark = f" m{next(self._numbers)}z" if rng.random() < 0.6 else ""
        if kind < 0.5:
            return rng.choice(PLAIN) + mark
        if kind < 0.75:
            return rng.choice(ODD) + mark
        if kind < 0.9:
            return rng.choice(self._literals) + mark
        return rng.choice(ODD) + rng.choice(self._literals) + mark + rng.choice(ODD)

    def _think(self, probability: float) -> str:
        thinks = self._thinks and self.rng.random() < probability
        return self.rng.choice(THOUGHTS) if thinks else ""

    def _begin(self, tools: Sequence[JsonValue]) -> list[Message]:
        rng = self.rng
        messages = [Message("system", self._text())] if rng.random() < 0.5 else []
        messages.append(Message("user", self._text()))
        if rng.random() < 0.1:
            messages.append(Message("user", self._text()))
        if rng.random() < 0.25:
            messages += self._history(tools)
        return messages

    def _history(self, tools: Sequence[JsonValue]) -> list[Message]:
        """Turns that the client made up."""
        if tools and self.rng.random() < 0.6:
            call = self._new_call()
            content = self.rng.choice(["", "x"])
            turn = Message("assistant", content, (call,), reasoning=self._think(0.6))
            return [turn, Message("tool", self._text(), tool_call_id=call.id)]
        turn = Message("assistant", self._text() or "y", reasoning=self._think(0.6))
        return [turn, Message("user", self._text())]

    def _new_call(self) -> ToolCall:
        name, key = self.rng.choice([("calculator", "expression"), ("get_weather", "city")])
        arguments = json.dumps({key: self._text()}, ensure_ascii=False)
        return ToolCall(f"call_{next(self._numbers):024x}", name, arguments)

    def _new_turn(self, tools: Sequence[JsonValue]) -> Message:
        rng = self.rng
        calls = ()
        if tools and rng.random() < 0.6:
            calls = tuple(self._new_call() for _ in range(rng.choice([1, 1, 1, 2, 3])))
        content = self._text() if not calls or rng.random() < 0.3 else ""
        thinking = self._think(0.9 if self.renderer.prompt_opens_thinking else 0.4)
        return Message("assistant", content, calls, reasoning=thinking)

    def _new_rest(self, turn: Message, tools: Sequence[JsonValue]) -> list[Message]:
        rng, rest = self.rng, list[Message]()
        order = list(turn.tool_calls)
        if rng.random() < 0.15:
            rng.shuffle(order)
        if rng.random() < 0.08:
            order = order[:-1]
        rest += [Message("tool", self._text(), tool_call_id=call.id) for call in order]
        if not rest or rng.random() < 0.2:
            rest.append(Message("user", self._text()))
        if rng.random() < 0.07:
            rest.insert(rng.choice([0, len(rest)]), Message("system", self._text()))
        if rng.random() < 0.07:
            rest.append(Message("user", self._text()))
        if rng.random() < 0.07:
            rest += self._history(tools)
        return rest

    def _echo(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as a client sends them back: without thinking, or edited."""
        rng = self.rng
        echo = list(messages)
        if rng.random() < 0.1:
            echo = [m._replace(reasoning="") for m in echo]
        if rng.random() < 0.04:
            at = rng.randrange(len(echo))
            echo[at] = echo[at]._replace(content=echo[at].content + "!")
        return echo

    # ------------------------------------------------------------- checks

    def _record(
        self, graph: Graph, call: PreparedCall, turn: Message, rest: Sequence[Message]
    ) -> Graph:
        """The graph with the turn that was sampled, sometimes read back from the store."""
        end = self.renderer.find_turn_end(turn, rest)
        tokens = self.renderer.template.encode("SAMPLED")
        if end is not None and self.rng.random() < 0.85:
            tokens.append(end)
        size = len(tokens)
        generation = Generation(
            tokens=tuple(tokens),
            logprobs=(0.0,) * size,
            versions=(0,) * size,
            stop="stop",
            sampling=Sampling(stop_ids=self.renderer.stop_ids),
            message=turn.to_json(),
        )
        stored = Call(
            id=call.id,
            attempt=AttemptId("r/1"),
            parent=call.parent,
            root=call.root,
            messages=tuple(m.to_json() for m in call.messages),
            prompt_suffix=call.prompt_suffix,
            prompt_length=len(call.tokens),
            prompt_digest=digest_tokens(call.tokens).hexdigest(),
            generations=(generation,),
            created=call.created,
            origin=call.origin,
        )
        if self.rng.random() < 0.1:
            return Graph([*graph.calls.values(), stored])
        graph.add(stored, call.messages, [turn], call.text)
        return graph

    def _check(self, call: PreparedCall, graph: Graph, tools: Sequence[JsonValue]) -> None:
        path = graph.collect_path(graph.get_turn(call.parent) if call.parent else None)
        earlier = [m for turn in path for m in (*turn.context, turn.message)]
        messages = [*earlier, *call.messages]
        self.counts["continued" if path else "full"] += 1
        if call.origin.fork is not None:
            self.counts[f"fork {call.origin.fork.value}"] += 1
        expected = self.reference.render(messages, tools)
        cause = self._compare(expected, path, call)
        if cause:
            got = self.renderer.template.decode_all(call.prompt_suffix)
            wire = json.dumps([m.to_json() for m in messages], ensure_ascii=False)
            self.differences.append(
                f"{self.name}: {cause}\n  messages {wire}\n  got  {got[-400:]!r}"
                f"\n  want {expected[-500:]!r}"
            )

    def _compare(self, expected: str, path: Sequence[Turn], call: PreparedCall) -> str:
        """The reason why a prompt is not the template's, or "" if it is."""
        ids = self.reference.encode(expected)
        if not path:
            return "" if tuple(ids) == call.prompt_suffix else "full render"
        if tuple(ids[len(ids) - len(call.prompt_suffix) :]) != call.prompt_suffix:
            return "end of the prompt"
        decode = self.renderer.template.decode_all
        first, *inner = [decode(turn.call.prompt_suffix) for turn in path]
        if not expected.startswith(first):
            return "beginning of the prompt"
        position, gaps = len(first), list[str]()
        for text in [*inner, decode(call.prompt_suffix)]:
            at = expected.find(text, position)
            if at < 0:
                return "middle of the prompt"
            gaps.append(expected[position:at])
            position = at + len(text)
        for gap, turn in zip(gaps, path, strict=True):
            own = json.dumps(turn.message.to_json(), ensure_ascii=False)
            lost = [mark for mark in re.findall(r"m\d+z", gap) if mark not in own]
            if lost:
                return f"{lost} is in no context"
        return ""


def make_fuzz(folder: Path, name: str, source: str, seed: int) -> PromptFuzz:
    """The fuzz of a template, with a small tokenizer of its family's tokens."""
    renderer = Renderer(template_of(folder / name, name, source))
    reference = TransformersTemplate(renderer, folder / name)
    return PromptFuzz(name, renderer, reference, random.Random(f"{seed} {name}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--continuations", type=int, default=10_000, help="in all templates")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("names", nargs="*", help="templates; all if none is named")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    templates = all_templates()
    names = args.names or sorted(templates)
    share = -(-args.continuations // len(names))
    total, failed, begun = Counter[str](), 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            fuzz = make_fuzz(Path(folder), name, templates[name], args.seed)
            anyio.run(fuzz.run, share)
            total += fuzz.counts
            failed += len(fuzz.differences)
            sys.stdout.write(f"{name:<32}{dict(sorted(fuzz.counts.items()))}\n")
            sys.stdout.write("".join(f"{text}\n" for text in fuzz.differences[:3]))
    seconds = time.perf_counter() - begun
    sys.stdout.write(f"{dict(total)}, {failed} differences, {seconds:.0f} s\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
