"""Tool calls and thinking as the model families write them, and text that only looks like them."""

import json
import random
import time

import pytest
from pydantic import JsonValue
from real_templates import trl_templates

from whet.gateway.parsers import PARSERS, ToolParser, choose_parser, choose_reasoning

BY_NAME: dict[str, ToolParser] = {p.format.name: p for p in reversed(PARSERS)}
ARGUMENTS = '{"city":  "Zürich", "days": 3}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'


def deepseek(words: str) -> str:
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


CALLS, CALLS_END = deepseek("tool calls begin"), deepseek("tool calls end")
BEGIN, END, SEP = deepseek("tool call begin"), deepseek("tool call end"), deepseek("tool sep")

WRITTEN = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "deepseek": f"{CALLS}{BEGIN}function{SEP}weather\n```json\n{ARGUMENTS}\n```{END}{CALLS_END}",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|>",
}
"""Formats in which the arguments stay as the model wrote them."""

REWRITTEN = {
    "qwen_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "pythonic": "<|tool_call_start|>[weather(city='Zürich', days=3)]<|tool_call_end|>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>',
    "atem": ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
    '<atem:parameter name="city">Zürich</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls><|eot|>",
}
OTHER_FORMS = [
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{ARGUMENTS}"),
    ("deepseek", f"{CALLS}{BEGIN}weather{SEP}{ARGUMENTS}{END}{CALLS_END}"),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}'),
    ("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"),
]
EVERY = [*WRITTEN.items(), *REWRITTEN.items(), *OTHER_FORMS]


@pytest.mark.parametrize(("name", "text"), EVERY)
def test_a_call_is_found(name: str, text: str) -> None:
    parsed = BY_NAME[name].parse(text)
    assert parsed is not None
    (call,) = parsed.calls
    assert (call.name, parsed.content) == ("weather", "")
    assert json.loads(call.arguments) == {"city": "Zürich", "days": 3}
    assert call.id.startswith("call_")


@pytest.mark.parametrize(("name", "text"), [*WRITTEN.items(), *OTHER_FORMS])
def test_arguments_stay_as_the_model_wrote_them(name: str, text: str) -> None:
    parsed = BY_NAME[name].parse(text)
    assert parsed is not None
    assert parsed.calls[0].arguments == ARGUMENTS


def test_every_format_is_tried() -> None:
    assert {name for name, _ in EVERY} == set(BY_NAME)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"),
        ("llama3_json", f"{CALL}; {CALL}"),
        ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]"),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
        ("pythonic", "[weather(city='Zürich', days=3), weather(city='Zürich', days=3)]"),
        ("deepseek", f"{CALLS}{BEGIN}a{SEP}{{}}{END}\n{BEGIN}a{SEP}{{}}{END}{CALLS_END}"),
        ("qwen_xml", REWRITTEN["qwen_xml"] * 2),
        ("glm", REWRITTEN["glm"] + "\n" + REWRITTEN["glm"]),
        ("gemma4", REWRITTEN["gemma4"] * 2),
    ],
)
def test_several_calls_have_ids_of_their_own(name: str, text: str) -> None:
    parsed = BY_NAME[name].parse(text)
    assert parsed is not None
    assert len(parsed.calls) == 2
    assert parsed.calls[0].id != parsed.calls[1].id


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "glm", "mistral", "deepseek", "gemma4"])
def test_text_before_a_call_is_content(name: str) -> None:
    written = {**WRITTEN, **REWRITTEN}[name]
    parsed = BY_NAME[name].parse(f"Let me see.\n\n{written}")
    assert parsed is not None
    assert parsed.content == "Let me see."


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\n{not json}\n</tool_call>"),
        ("hermes", f"<tool_call>{CALL}"),
        ("hermes", f"<tool_call>{CALL}</tool_call> and text"),
        ("hermes", '<tool_call>{"name": "a", "arguments": "text"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "<|im_end|>", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>'),
        ("llama3_json", '{"name": "a"}'),
        ("llama3_json", "{1}"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][1, 2"),
        ("mistral", "[TOOL_CALLS]weather[ARGS]{"),
        ("pythonic", "[__import__('os').system('true')]"),
        ("pythonic", "[f(x)]"),
        ("pythonic", "[f(**{'a': 1})]"),
        ("pythonic", "[f(a=" + "(" * 500 + ")"),
        ("pythonic", "[f(a='\\ud800')]"),
        ("pythonic", "[f(a=1e999)]"),
        ("deepseek", f"{CALLS}{BEGIN}a{SEP}[]{END}{CALLS_END}"),
        ("qwen_xml", "<tool_call>\n<function=a>\n<parameter=b>\n1"),
        ("glm", "<tool_call>a\n<arg_key>b</arg_key></tool_call>"),
        ("gemma4", "<|tool_call>call:a{b:}<tool_call|>"),
        ("harmony", "<|channel|>commentary to=functions.a<|message|>{<|call|>"),
    ],
)
def test_what_only_looks_like_a_call_is_none(name: str, text: str) -> None:
    assert BY_NAME[name].parse(text) is None


def test_a_tools_schema_gives_types_to_arguments_written_without() -> None:
    def tool(kind: str) -> JsonValue:
        parameters: JsonValue = {"type": "object", "properties": {"days": {"type": kind}}}
        return {"type": "function", "function": {"name": "weather", "parameters": parameters}}

    for name in ("qwen_xml", "glm", "atem"):
        as_text = BY_NAME[name].parse(REWRITTEN[name], [tool("string")])
        as_number = BY_NAME[name].parse(REWRITTEN[name], [tool("integer")])
        assert as_text is not None
        assert as_number is not None
        assert json.loads(as_text.calls[0].arguments)["days"] == "3"
        assert json.loads(as_number.calls[0].arguments)["days"] == 3


def test_the_template_chooses_the_formats() -> None:
    sources = trl_templates()
    chosen = {name: choose_parser(sources[name]).format.name for name in sources}
    assert chosen["qwen3"] == "hermes"
    assert chosen["llama3_1"] == "llama3_json"
    assert choose_parser("nothing of the kind").format.name == "hermes"
    assert choose_parser("[TOOL_CALLS]").format.name == "mistral"
    assert choose_reasoning(sources["qwen3"]).name == "think"
    assert choose_reasoning(sources["gemma4"]).name == "gemma4"
    assert choose_reasoning(sources["qwen2_5"]).name == "none"


ALPHABET = [
    *(token for parser in PARSERS for token in parser.format.tokens),
    *(marker for parser in PARSERS for marker in parser.format.markers),
    *'{}[]()"\\\n :,=<>|`',
    *("name", "arguments", "parameters", "true", "NaN", "1e999", "\\ud800", "call:", "é🙂"),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "to=functions.f"),
    *('<atem:invoke name="f">', "</atem:invoke>", "```json", "f(a=1)", "[f(", "\x00"),
]


def mutated(chance: random.Random) -> str:
    """Pieces of every format in any order, or a good call with a few letters changed."""
    if chance.random() < 0.5:
        return "".join(chance.choices(ALPHABET, k=chance.randrange(40)))
    text = list(chance.choice([text for _, text in EVERY]))
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(text) + 1)
        text[at : at + chance.randrange(4)] = chance.choice(ALPHABET)
    return "".join(text)


def test_no_text_makes_a_parser_raise() -> None:
    chance = random.Random(20)
    for _ in range(20_000):
        text = mutated(chance)
        parsed = chance.choice(PARSERS).parse(text)
        if parsed is not None:
            assert parsed.calls
            assert all(isinstance(json.loads(call.arguments), dict) for call in parsed.calls)
    for parser in PARSERS:
        for _, text in EVERY:
            parser.parse(text)


@pytest.mark.parametrize("parser", PARSERS, ids=lambda p: p.format.name)
def test_long_hostile_text_is_read_in_little_time(parser: ToolParser) -> None:
    openings = [*parser.format.markers, *parser.format.starts, *parser.format.tokens, ""]
    start = time.perf_counter()
    for opening in openings:
        for filler in (" ", "\n", "[", "{", "a", '{"a":', "-", opening):
            parser.parse(opening + filler * 20_000)
            parser.parse((opening + filler) * 5_000)
    assert time.perf_counter() - start < 20
