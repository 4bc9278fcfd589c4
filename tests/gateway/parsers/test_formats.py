"""Tool calls and thinking as the model families write them, and text that only looks like them."""

import json
import random
import time

import pytest
from pydantic import JsonValue

from support.models.real_templates import trl_templates
from whet.gateway.parsers.formats import PARSERS, ReasoningFormat, choose_parser, choose_reasoning
from whet.gateway.parsers.parser import ToolParser
from whet.gateway.templates.detokenize import InlineMessageParser

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
    "tool_calls": f"<tool_calls>[{CALL}]</tool_calls>",
    "nemotron_v2": f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    "granite": f"<|tool_call|>[{CALL}]",
    "gigachat3": f"function call<|role_sep|>\n{CALL}",
    "gigachat3_1": f"<|function_call|>{CALL}",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
    f'"parameters": {ARGUMENTS}}}\n]<|END_ACTION|>',
    "solar": "<|tool_calls|><|tool_call:begin|>a1b2c3<|tool_call:name|>weather<|tool_call:args|>"
    f"{ARGUMENTS}<|tool_call:end|>",
    "functionary": f"<function=weather>{ARGUMENTS}</function>",
    "functionary_3_2": f"weather\n{ARGUMENTS}",
    "command_r": f'Action:\n```json\n[{{"tool_name": "weather", "parameters": {ARGUMENTS}}}]```',
    "functools": f" functools[{CALL}]",
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
    "seed": "<seed:tool_call>\n<function=weather>\n<parameter=city>Zürich</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich'
    '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": 'M<tool_call>\nM<invoke name="weather">M<city>ZürichM</city>M<days>3M</days>'
    "M</invoke>\nM</tool_call>".replace("M", "]<]minimax[>["),
    "minicpm5": '<function name="weather"><param name="city">Zürich</param>'
    '<param name="days">3</param></function>',
    "deepseek_dsml": '<Dfunction_calls>\n<Dinvoke name="weather">\n<Dparameter name="city" '
    'string="true">Zürich</Dparameter>\n<Dparameter name="days" string="false">3</Dparameter>\n'
    "</Dinvoke>\n</Dfunction_calls>".replace("D", "\uff5cDSML\uff5c"),
    "hy3": "<tool_calls:o>\n<tool_call:o>weather<tool_sep:o>\n<arg_key:o>city</arg_key:o>\n"
    "<arg_value:o>Zürich</arg_value:o>\n<arg_key:o>days</arg_key:o>\n"
    "<arg_value:o>3</arg_value:o>\n</tool_call:o>\n</tool_calls:o>",
    "kimi_k3": 'OtoolsSOcall tool="weather" index="1"SOargument key="city" type="string"S'
    'ZürichCargumentSOargument key="days" type="number"S3CargumentSCcallSCtoolsSCmessageS'.replace(
        "O", "<|open|>"
    )
    .replace("S", "<|sep|>")
    .replace("C", "<|close|>"),
    "apertus": f'<|tools_prefix|>[{{"weather": {ARGUMENTS}}}]<|tools_suffix|>',
    "olmo3": "<function_calls>\nweather(city='Zürich', days=3)\n</function_calls>",
}
OTHER_FORMS = [
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{ARGUMENTS}"),
    ("deepseek", f"{CALLS}{BEGIN}weather{SEP}{ARGUMENTS}{END}{CALLS_END}"),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}'),
    ("tool_calls", f"<tool_calls>\n{CALL}\n</tool_calls>"),
    ("hermes", f'<tool_call>{CALL[:-1]}, "id": "7"}}</tool_call>'),
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


def test_every_format_is_tested() -> None:
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
def test_malformed_calls_are_not_parsed(name: str, text: str) -> None:
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


TAGGED = [
    (name, text)
    for name, text in EVERY
    if name in ("hermes", "llama3_json", "mistral", "qwen_xml", "glm", "gemma4")
]
"""Formats that `test_families.py` does not stream."""


@pytest.mark.parametrize(("name", "text"), TAGGED)
def test_a_call_is_streamed_as_it_is_read_wherever_the_text_is_split(name: str, text: str) -> None:
    parser, thinking = BY_NAME[name], ReasoningFormat("think", "<think>", "</think>")
    beside = "" if parser.format.starts else "Let me see.\n"

    def new() -> InlineMessageParser:
        return InlineMessageParser(thinking, parser, in_thinking=False)

    for before in (beside, f"<think>\nHm.\n</think>\n\n{beside}", "<think>\nHm."):
        if before.endswith("Hm.") and not text.startswith(tuple(parser.format.markers)):
            continue  # only a marker ends thinking that was not closed
        written = before + text
        whole = new().parse(written, [])
        assert [call.name for call in whole.tool_calls] == ["weather"]
        for at in range(len(written)):
            stream = new()
            deltas = [stream.feed(written[:at]), stream.feed(written[at:])]
            assert whole.content.startswith("".join(delta.content for delta in deltas))
            assert whole.reasoning.startswith("".join(delta.reasoning for delta in deltas))


@pytest.mark.parametrize(
    ("name", "text", "id"),
    [
        ("kimi", WRITTEN["kimi"], "functions.weather:0"),
        ("solar", WRITTEN["solar"], "a1b2c3"),
        ("cohere", WRITTEN["cohere"], "0"),
        ("mistral", f"[TOOL_CALLS]weather[CALL_ID]aB3dE5fG7[ARGS]{ARGUMENTS}", "aB3dE5fG7"),
        ("mistral", f'[TOOL_CALLS][{CALL[:-1]}, "id": "aB3dE5fG7"}}]', "aB3dE5fG7"),
        ("hermes", WRITTEN["hermes"], ""),
    ],
)
def test_the_id_that_the_model_wrote_is_kept(name: str, text: str, id: str) -> None:
    parsed = BY_NAME[name].parse(text)
    assert parsed is not None
    assert [call.model_id for call in parsed.calls] == [id]


def test_values_are_exact_where_the_format_is() -> None:
    text = REWRITTEN["seed"].replace("Zürich", "\n a\n")
    parsed = BY_NAME["seed"].parse(text)
    assert parsed is not None
    assert json.loads(parsed.calls[0].arguments)["city"] == "\n a\n"


def test_a_line_break_in_a_python_string_is_read() -> None:
    parsed = BY_NAME["pythonic"].parse("<|tool_call_start|>[run(code='a\nb')]<|tool_call_end|>")
    assert parsed is not None
    assert json.loads(parsed.calls[0].arguments) == {"code": "a\nb"}


def test_the_template_chooses_the_formats() -> None:
    sources = trl_templates()
    chosen = {name: choose_parser(sources[name]).format.name for name in sources}
    assert chosen["qwen3"] == "hermes"
    assert chosen["llama3_1"] == "llama3_json"
    assert choose_parser("nothing of the kind").format.name == "none"
    assert choose_parser("nothing of the kind").parse(WRITTEN["hermes"]) is None
    assert choose_parser("[TOOL_CALLS]").format.name == "mistral"
    assert choose_reasoning(sources["qwen3"]).name == "think"
    assert choose_reasoning(sources["gemma4"]).name == "gemma4"
    assert choose_reasoning(sources["qwen2_5"]).name == "none"


ALPHABET = [
    *(token for parser in PARSERS for token in parser.format.special_tokens),
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


@pytest.mark.parametrize("number", ["0x" + "f" * 4000, "1e999", "-1e999"])
def test_a_number_that_no_json_holds_stays_text(number: str) -> None:
    schema: JsonValue = {"type": "object", "properties": {"days": {"type": "array"}}}
    tool: JsonValue = {"function": {"name": "weather", "parameters": schema}}
    parsed = BY_NAME["glm"].parse(REWRITTEN["glm"].replace("3", f"[{number}]"), [tool])
    assert parsed is not None
    assert json.loads(parsed.calls[0].arguments)["days"] == f"[{number}]"


def test_many_quotes_that_never_close_are_parsed_quickly() -> None:
    start = time.perf_counter()
    assert BY_NAME["pythonic"].parse("[" + '\\"' * 49_000) is None
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("parser", PARSERS, ids=lambda p: p.format.name)
def test_long_hostile_text_is_parsed_quickly(parser: ToolParser) -> None:
    openings = [*parser.format.markers, *parser.format.starts, *parser.format.special_tokens, ""]
    start = time.perf_counter()
    for opening in openings:
        for filler in (" ", "\n", "[", "{", "a", '{"a":', "-", opening):
            parser.parse(opening + filler * 20_000)
            parser.parse((opening + filler) * 5_000)
    assert time.perf_counter() - start < 20
