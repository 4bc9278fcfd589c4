"""Mutated requests and texts: every one is understood, or refused with one sentence; nothing else.

Seeded, so that a failure comes back. The seeds are real: requests that SDKs sent, and texts in the
form of every model family.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest

from whet.errors import WhetError
from whet.gateway.app import DIALECTS
from whet.gateway.graph import Graph
from whet.gateway.parsers.formats import PARSERS

RECORDINGS = Path(__file__).parents[1] / "support" / "recordings"
CASES = 2_000
MANY_CASES = 110_000

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1e308, 2**70, -0.5, "", "a", "\x00", "\ud800", "é" * 500, [], {},
    [[]], [None], {"": None}, {"type": "text"}, {"type": "function"}, "auto", "none", "function",
    "<|im_end|>", "call_1", [{"type": "text", "text": "x"}], [1, 2, 3], "item_reference",
)  # fmt: skip
NAMES = ("type", "role", "n", "stream", "x", "id", "content", "tool_choice", "text")


def read_bodies() -> dict[str, list[Any]]:
    """Bodies that SDKs sent, by path."""
    bodies: dict[str, dict[str, Any]] = {}
    for file in sorted(RECORDINGS.glob("*.jsonl.gz")):
        for line in gzip.decompress(file.read_bytes()).decode().splitlines():
            record = json.loads(line)
            key = json.dumps(record["body"], sort_keys=True)
            bodies.setdefault(record["path"].removeprefix("/v1"), {})[key] = record["body"]
    return {path: list(each.values()) for path, each in bodies.items()}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a value with each of its keys."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield value, key
            yield from places(each)
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield value, at
            yield from places(each)


def mutated(value: Any, random: Random) -> Any:
    """A value that is wrong in one to three places."""
    value = json.loads(json.dumps(value))
    for _ in range(random.randint(1, 3)):
        found = list(places(value))
        if not found:
            return deepcopy(random.choice(ODD))
        container, key = random.choice(found)
        match random.randrange(6):
            case 0:
                container[key] = deepcopy(random.choice(ODD))
            case 1:
                del container[key]
            case 2:
                other, name = random.choice(found)
                moved = other.get(name) if isinstance(other, dict) else None
                container[key] = json.loads(json.dumps(moved))
            case 3 if isinstance(container, dict):
                container[random.choice(NAMES)] = deepcopy(random.choice(ODD))
            case 4 if isinstance(container, list):
                container.append(deepcopy(container[key]))
            case _:
                container[key] = [container[key]]
    return value


def spoilt(text: bytes, random: Random) -> bytes:
    """Text with some bytes changed, cut out or doubled."""
    data = bytearray(text)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        match random.randrange(4):
            case 0:
                del data[at : at + random.randint(1, 12)]
            case 1:
                data[at:at] = bytes(random.randrange(256) for _ in range(random.randint(1, 3)))
            case 2:
                data[at:at] = data[max(0, at - random.randint(1, 30)) : at]
            case _:
                data[at:at] = random.choice([b'"', b"{", b"}", b"[", b"]", b"\\", b",", b"\\ud800"])
    return bytes(data)


def fuzz_dialects(cases: int) -> int:
    """Count the bodies that were understood."""
    random = Random("bodies")
    bodies = read_bodies()
    understood = 0
    for case in range(cases):
        dialect = DIALECTS[case % len(DIALECTS)]
        seed = random.choice(bodies[dialect.path])
        body = json.dumps(mutated(seed, random) if case % 3 else seed).encode()
        body = spoilt(body, random) if case % 3 == 0 else body
        with suppress(WhetError):
            dialect.parse(body).to_model_request(Graph())
            understood += 1
    return understood


DEEPSEEK = (
    "<|tool calls begin|><|tool call begin|>function<|tool sep|>f\n```json\n"
    '{"a":1}\n```<|tool call end|><|tool calls end|>'
).translate({ord("|"): "\uff5c", ord(" "): "\u2581"})
"""Its bars are full-width, and its gaps no spaces."""
TEXTS = (
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"], "b": {"c": null}}}\n</tool_call>',
    'Well.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g",',
    '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
    '<|python_tag|>f.call(a="x", b=[1, 2.5, {"c": True}])<|eom_id|>',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b"}}]',
    '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
    "[f(a=1, b='x\\n', c=[None, -1e3], d={'k': (1,)}), g()]",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    DEEPSEEK,
    '<|tool_call>call:f{a:<|"|>2 + 3<|"|>,b:[1,true],c:{d:null}}<tool_call|>',
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>x</parameter>\n</function>",
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": 1}<|call|>',
    "<arg_key>a</arg_key>\n<arg_value>1</arg_value>",
    "```tool_code\nprint(f(a=1))\n```",
    "<think>\nfirst\n</think>\n\nthen",
)


def fuzz_parsers(cases: int) -> int:
    """Count the texts that had calls."""
    random = Random("texts")
    own = [[text for text in TEXTS if parser.parse(text)] for parser in PARSERS]
    found = 0
    for case in range(cases):
        at = case % len(PARSERS)
        parser = PARSERS[at]
        seeds = own[at] if own[at] and random.random() < 0.7 else TEXTS
        text = spoilt(random.choice(seeds).encode(), random).decode(errors="replace")
        if random.random() < 0.2:
            text += random.choice(TEXTS)
        parsed = parser.parse(text, ())
        if parsed is not None:
            found += 1
            for call in parsed.calls:
                assert isinstance(json.loads(call.arguments), dict), text
                call.arguments.encode()
                assert call.id
                assert call.name
    return found


@pytest.mark.parametrize("fuzz", [fuzz_dialects, fuzz_parsers])
def test_mutations_are_understood_or_refused(fuzz: Callable[[int], int]) -> None:
    assert 0 < fuzz(CASES) < CASES


@pytest.mark.slow
@pytest.mark.parametrize("fuzz", [fuzz_dialects, fuzz_parsers])
def test_very_many_mutations_are_understood_or_refused(fuzz: Callable[[int], int]) -> None:
    assert 0 < fuzz(MANY_CASES) < MANY_CASES
