"""Cost of rendering and checking the prompt of a call, as a conversation grows.

    python bench/rendering.py [--model tiny] [--turns 4 50 200] [--repeat 7]

A conversation of tool calls with results of 400 characters. *continued* is the whole step of the
gateway: find the stored turn, render the conversation, compare it with the stored prompt, encode
the suffix. *in full* renders and encodes the conversation from the beginning, as a server without
stored tokens does for every call. CPU time of one thread, the least of some repetitions.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

from whet.gateway.graph import Graph, Turn
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import RenderedPrompt, Renderer
from whet.gateway.templates.suffix import TOOL
from whet.models.catalog import resolve_model
from whet.types import AttemptId, Call, CallId, Generation, Sampling, digest_tokens

RESULT = "result " * 57
TOOLS = (TOOL,)
ROOT = "root"


def build_conversation(renderer: Renderer, turns: int) -> tuple[Graph, list[Message]]:
    """A stored conversation of so many turns, and the messages of the request after them."""
    graph = Graph()
    messages = [Message("system", "Be brief."), Message("user", "Fix it.")]
    parent: Turn | None = None
    for number in range(turns):
        rest = messages if parent is None else messages[-1:]
        text = graph.texts.get(parent.call.id) if parent else None
        if parent is None:
            prompt = renderer.render_full(rest, TOOLS)
        else:
            found = renderer.render_suffix(graph.collect_path(parent), rest, TOOLS, text)
            assert isinstance(found, RenderedPrompt), found.cause
            prompt = found
        arguments = json.dumps({"expression": f"{number} + 3"})
        turn = Message("assistant", "", (ToolCall(f"call_{number}", "calculator", arguments),))
        result = Message("tool", RESULT, tool_call_id=f"call_{number}")
        end = renderer.find_turn_end(turn, [result])
        tokens = (*renderer.template.encode(arguments), *([] if end is None else [end]))
        context = tuple(prompt.ids)
        served = [*graph.collect_tokens(parent), *context]
        generation = Generation(
            tokens=tokens,
            logprobs=(0.0,) * len(tokens),
            versions=(0,) * len(tokens),
            stop="stop",
            sampling=Sampling(stop_ids=renderer.stop_ids),
            message=turn.to_json(),
        )
        call = Call(
            id=CallId(f"c{number}"),
            attempt=AttemptId("r/1"),
            parent=parent.id if parent else None,
            root=ROOT,
            messages=tuple(m.to_json() for m in rest),
            prompt_suffix=context,
            prompt_length=len(served),
            prompt_digest=digest_tokens(served).hexdigest(),
            generations=(generation,),
            created=0.0,
        )
        graph.add(call, rest, [turn], prompt.text)
        parent = graph.get_turn(call.generation_id(0))
        messages = [*messages, turn, result]
    return graph, messages


def measure(work: Callable[[], object], repeat: int) -> float:
    """The least CPU time of some repetitions, in milliseconds."""
    taken: list[float] = []
    for _ in range(repeat):
        begun = time.thread_time()
        work()
        taken.append(time.thread_time() - begun)
    return min(taken) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="tiny", help="a model, by name or folder")
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 50, 200])
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    renderer = Renderer(ChatTemplate(resolve_model(args.model)))
    sys.stdout.write("| turns | continued, ms | in full, ms | ratio |\n|---|---|---|---|\n")
    for turns in args.turns:
        graph, messages = build_conversation(renderer, turns)

        def continue_call(graph: Graph = graph, messages: list[Message] = messages) -> None:
            found = graph.find(ROOT, graph.restore_calls(messages, TOOLS))
            assert found.turn is not None
            text = graph.texts[found.turn.call.id]
            suffix = renderer.render_suffix(graph.collect_path(found.turn), found.rest, TOOLS, text)
            assert isinstance(suffix, RenderedPrompt)

        def render_all(messages: list[Message] = messages) -> None:
            renderer.render_full(messages, TOOLS)

        continued, full = measure(continue_call, args.repeat), measure(render_all, args.repeat)
        sys.stdout.write(f"| {turns} | {continued:.2f} | {full:.2f} | {full / continued:.1f} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
