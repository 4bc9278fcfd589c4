"""Calls as each model family documents them, whole and streamed at every split.

The layouts are those of the families' chat templates and model cards, and of the test cases of vLLM
and llama.cpp.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from whet.gateway.messages import Message
from whet.gateway.parsers.formats import PARSERS, REASONING_FORMATS
from whet.gateway.parsers.parser import ToolParser
from whet.gateway.templates.detokenize import InlineMessageParser

PARSER: dict[str, ToolParser] = {p.format.name: p for p in reversed(PARSERS)}
REASONING = {format.name: format for format in REASONING_FORMATS}

Calls = Sequence[tuple[str, Mapping[str, Any]]]
Writer = Callable[[str, Calls], str]
"""Writes text and the calls after it as the models of a family do."""

SHAPES: dict[str, tuple[str, Calls]] = {
    "one call": ("", [("get_weather", {"city": "Zürich", "days": 3})]),
    "text before several calls": (
        "Let me see.",
        [("get_weather", {"city": "Paris"}), ("get_time", {"zone": "Europe/Paris"})],
    ),
    "no arguments": ("", [("list_files", {})]),
    "nested values": (
        "",
        [
            (
                "plot",
                {
                    "points": [{"x": 1, "y": -2.5}, {"x": 0, "y": None}],
                    "style": {"color": "red", "dashed": True, "tags": ["a", "東京 🙂"]},
                },
            )
        ],
    ),
    "quotes and markup": (
        "Well:",
        [("run", {"code": 'print("it\'s <b>1 & 2</b> {\\"a\\": [1]}")\nexit()'})],
    ),
}


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: object) -> str:
    """A value as formats without types write it."""
    return value if isinstance(value, str) else dump(value)


def write_objects(
    calls: Calls, name: str = "name", arguments: str = "arguments", id: str = ""
) -> list[str]:
    """Each call as a JSON object."""
    return [
        dump(({id: str(at)} if id else {}) | {name: tool, arguments: values})
        for at, (tool, values) in enumerate(calls)
    ]


def between(open: str, close: str, separator: str = ", ", **keys: str) -> Writer:
    """Writes a JSON list of calls, or one object a line, between two tags."""
    return lambda text, calls: text + open + separator.join(write_objects(calls, **keys)) + close


def tagged(call: str, argument: str, open: str = "", close: str = "") -> Writer:
    """Writes calls by templates of `{name}`, `{arguments}`, `{key}`, `{value}`."""

    def write(text: str, calls: Calls) -> str:
        written = [
            call.replace("{name}", tool).replace(
                "{arguments}",
                "".join(
                    argument.replace("{key}", key)
                    .replace("{type}", type_name(value))
                    .replace("{is_text}", dump(isinstance(value, str)))
                    .replace("{value}", plain(value))
                    for key, value in values.items()
                ),
            )
            for tool, values in calls
        ]
        return text + open + "".join(written) + close

    return write


def type_name(value: object) -> str:
    names: dict[type, str] = {str: "string", bool: "boolean", dict: "object", list: "array"}
    return "null" if value is None else names.get(type(value), "number")


def per_call(open: str, call: str, close: str) -> Writer:
    """Writes calls by a template of `{name}`, `{index}` and `{json}`."""

    def write(text: str, calls: Calls) -> str:
        written = (
            call.replace("{name}", tool).replace("{index}", str(at)).replace("{json}", dump(values))
            for at, (tool, values) in enumerate(calls)
        )
        return text + open + "".join(written) + close

    return write


def write_python(open: str, close: str, separator: str) -> Writer:
    def write(text: str, calls: Calls) -> str:
        written = (
            f"{tool}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
            for tool, values in calls
        )
        return text + open + separator.join(written) + close

    return write


def write_apertus(text: str, calls: Calls) -> str:
    return f"{text}<|tools_prefix|>{dump([{tool: v} for tool, v in calls])}<|tools_suffix|>"


def write_command_r(text: str, calls: Calls) -> str:
    listed = [{"tool_name": tool, "parameters": values} for tool, values in calls]
    return f"{text}\nAction:\n```json\n{json.dumps(listed, ensure_ascii=False, indent=4)}```\n"


def write_functionary_3_2(text: str, calls: Calls) -> str:
    messages = [*([f"all\n{text}"] if text else []), *(f"{t}\n{dump(v)}" for t, v in calls)]
    return ">>>".join(messages)  # the prompt ends with the first >>>


def write_minicpm5(text: str, calls: Calls) -> str:
    def parameter(key: str, value: object) -> str:
        written = plain(value)
        verbatim = f"<![CDATA[{written}]]>" if set(written) & set("<&\n") else written
        return f'<param name="{key}">{verbatim}</param>'

    return text + "\n".join(
        f'<function name="{tool}">{"".join(parameter(*item) for item in values.items())}</function>'
        for tool, values in calls
    )


def write_minimax_m3(text: str, calls: Calls) -> str:
    def element(name: str, value: object) -> str:
        match value:
            case dict():
                inner = "".join(element(key, each) for key, each in value.items())
            case list():
                inner = "".join(element("item", each) for each in value)
            case _:
                inner = plain(value)
        return f"M<{name}>{inner}M</{name}>"

    written = "\n".join(
        f'M<invoke name="{tool}">{"".join(element(*item) for item in values.items())}M</invoke>'
        for tool, values in calls
    )
    return text + f"M<tool_call>\n{written}\nM</tool_call>".replace("M<", "]<]minimax[>[<")


def write_kimi_k3(text: str, calls: Calls) -> str:
    write = tagged(
        '<|open|>call tool="{name}" index="1"<|sep|>{arguments}<|close|>call<|sep|>',
        '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|><|close|>message<|sep|>",
    )
    return write(f"<|open|>response<|sep|>{text}<|close|>response<|sep|>", calls)


def fullwidth(text: str) -> str:
    """DeepSeek's tokens, whose bars are full-width and whose gaps are no spaces."""
    return text.replace("|", "\uff5c").replace("_", "\u2581")


DSML_CALL = '<|DSML|invoke name="{name}">\n{arguments}</|DSML|invoke>\n'.replace("|", "\uff5c")
DSML_ARGUMENT = (
    '<|DSML|parameter name="{key}" string="{is_text}">{value}</|DSML|parameter>\n'
).replace("|", "\uff5c")
SEED_CALL = "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>\n"
HY3_CALL = "<tool_callS>{name}<tool_sepS>\n{arguments}</tool_callS>\n"
HY3_ARGUMENT = "<arg_keyS>{key}</arg_keyS>\n<arg_valueS>{value}</arg_valueS>\n"
SOLAR_CALL = (
    "<|tool_call:begin|>id{index}<|tool_call:name|>{name}<|tool_call:args|>{json}<|tool_call:end|>"
)

FAMILIES: dict[str, tuple[str, str, Writer]] = {
    # family: format of calls, format of thinking, writer
    "GigaChat 3": ("gigachat3", "think", between("function call<|role_sep|>\n", "", "")),
    "GigaChat 3.1": ("gigachat3_1", "think", between("<|function_call|>", "", "")),
    "MiniMax M1": ("tool_calls", "think", between("<tool_calls>\n", "\n</tool_calls>", "\n")),
    "Apriel": ("tool_calls", "apriel", between("<tool_calls>[", "]</tool_calls>")),
    "MiniMax M2": (
        "minimax_m2",
        "think",
        tagged(
            '<invoke name="{name}">\n{arguments}</invoke>\n',
            '<parameter name="{key}">{value}</parameter>\n',
            "\n<minimax:tool_call>\n",
            "</minimax:tool_call>",
        ),
    ),
    "MiniMax M3": ("minimax_m3", "minimax_m3", write_minimax_m3),
    "functionary 3.1": (
        "functionary",
        "think",
        per_call("", "<function={name}>{json}</function>", ""),
    ),
    "functionary 3.2": ("functionary_3_2", "think", write_functionary_3_2),
    "MiniCPM5": ("minicpm5", "think", write_minicpm5),
    "Granite 3.3": ("granite", "think", between("<|tool_call|>[", "]")),
    "Granite 3.1": ("granite", "think", between("<tool_call> [", "]")),
    "LFM2.5": (
        "pythonic",
        "think",
        write_python("<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    ),
    "DeepSeek V3": (
        "deepseek",
        "think",
        per_call(
            fullwidth("<|tool_calls_begin|>"),
            fullwidth("<|tool_call_begin|>function<|tool_sep|>")
            + "{name}\n```json\n{json}\n```"
            + fullwidth("<|tool_call_end|>"),
            fullwidth("<|tool_calls_end|>"),
        ),
    ),
    "DeepSeek V3.1": (
        "deepseek",
        "think",
        per_call(
            fullwidth("<|tool_calls_begin|>"),
            fullwidth("<|tool_call_begin|>{name}<|tool_sep|>")
            + "{json}"
            + fullwidth("<|tool_call_end|>"),
            fullwidth("<|tool_calls_end|>"),
        ),
    ),
    "DeepSeek V3.2": (
        "deepseek_dsml",
        "think",
        tagged(
            DSML_CALL,
            DSML_ARGUMENT,
            "\n\n<\uff5cDSML\uff5cfunction_calls>\n",
            "</\uff5cDSML\uff5cfunction_calls>",
        ),
    ),
    "DeepSeek V4": (
        "deepseek_dsml",
        "think",
        tagged(
            DSML_CALL,
            DSML_ARGUMENT,
            "\n\n<\uff5cDSML\uff5ctool_calls>\n",
            "</\uff5cDSML\uff5ctool_calls>",
        ),
    ),
    "Kimi K2": (
        "kimi",
        "think",
        per_call(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.{name}:{index}"
            "<|tool_call_argument_begin|>{json}<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "Kimi K2 without a section": (
        "kimi",
        "think",
        per_call(
            "",
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json}",
            "",
        ),
    ),
    "Kimi K3": ("kimi_k3", "kimi_k3", write_kimi_k3),
    "Command R7B": (
        "cohere",
        "cohere",
        between(
            "<|START_ACTION|>[\n    ",
            "\n]<|END_ACTION|>",
            ",\n    ",
            name="tool_name",
            arguments="parameters",
            id="tool_call_id",
        ),
    ),
    "Command R+": ("command_r", "think", write_command_r),
    "Apertus": ("apertus", "apertus", write_apertus),
    "Nemotron Nano v2": ("nemotron_v2", "think", between("<TOOLCALL>[", "]</TOOLCALL>")),
    "Hy3": (
        "hy3",
        "hy3",
        tagged(
            HY3_CALL.replace("S>", ":opensource>"),
            HY3_ARGUMENT.replace("S>", ":opensource>"),
            "<tool_calls:opensource>\n",
            "</tool_calls:opensource>",
        ),
    ),
    "Hy3 preview": (
        "hy3",
        "think",
        tagged(
            HY3_CALL.replace("S>", ">"),
            HY3_ARGUMENT.replace("S>", ">"),
            "<tool_calls>\n",
            "</tool_calls>",
        ),
    ),
    "Solar": ("solar", "solar", per_call("<|tool_calls|>", SOLAR_CALL, "")),
    "OLMo 3": (
        "olmo3",
        "think",
        write_python("<function_calls>\n", "\n</function_calls>", "\n"),
    ),
    "Seed-OSS": (
        "seed",
        "seed",
        tagged(SEED_CALL, "<parameter={key}>{value}</parameter>\n"),
    ),
    "FireFunction": ("functools", "think", between(" functools[", "]")),
}
ONE_CALL = ("GigaChat 3", "GigaChat 3.1")
"""Families that write one call a turn."""


def new_parser(family: str, *, in_thinking: bool = False) -> InlineMessageParser:
    format, reasoning, _ = FAMILIES[family]
    parser = PARSER[format]
    return InlineMessageParser(
        REASONING[reasoning],
        parser,
        in_thinking=in_thinking,
        removed=parser.format.special_tokens,
        tags=parser.format.content_tags,
        prefix=parser.format.content_prefix,
    )


def read(family: str, written: str, *, in_thinking: bool = False) -> Message:
    """Read a turn whole, and check that it is streamed so wherever the text is split."""
    whole = new_parser(family, in_thinking=in_thinking).parse(written, [])
    chunks = [[written[:at], written[at:]] for at in range(len(written))]
    for parts in [*chunks, [*written]]:
        stream = new_parser(family, in_thinking=in_thinking)
        deltas = [stream.feed(part) for part in parts]
        assert whole.content.startswith("".join(delta.content for delta in deltas))
        assert whole.reasoning.startswith("".join(delta.reasoning for delta in deltas))
    return whole


def parsed_calls(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, call.parse_arguments()) for call in message.tool_calls]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_read_as_they_were_written(family: str, shape: str) -> None:
    text, calls = SHAPES[shape]
    calls = calls[:1] if family in ONE_CALL else calls
    message = read(family, FAMILIES[family][2](text, calls))
    assert parsed_calls(message) == list(calls)
    assert message.content == text


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_after_thinking_are_read(family: str) -> None:
    _, reasoning, write = FAMILIES[family]
    text, calls = SHAPES["one call"]
    thinking = f"{REASONING[reasoning].open}First the weather.{REASONING[reasoning].close}"
    message = read(family, thinking + write(text, calls))
    assert (parsed_calls(message), message.content) == (list(calls), "")
    assert message.reasoning.strip() == "First the weather."


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("Kimi K3", "functionary 3.2")])
def test_a_call_inside_unclosed_thinking_ends_it(family: str) -> None:
    _, reasoning, write = FAMILIES[family]
    text, calls = SHAPES["one call"]
    for opening in (REASONING[reasoning].open, ""):
        written = f"{opening}First the weather." + write(text, calls)
        message = read(family, written, in_thinking=True)
        assert (parsed_calls(message), message.content) == (list(calls), "")
        assert message.reasoning.strip() == "First the weather."


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_content(family: str) -> None:
    parser = PARSER[FAMILIES[family][0]]
    message = read(family, parser.format.content_prefix + "It is 5 > 4 & <b>warm</b>.")
    assert (message.content, message.tool_calls) == ("It is 5 > 4 & <b>warm</b>.", ())


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "either": {"type": ["integer", "null"]},
                "count": {"type": "integer"},
                "flag": {"type": "boolean"},
                "word": {"enum": ["1", "2"]},
                "items": {"type": "array", "items": {"type": "string"}},
                "any": {},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "42", "42"),
        ("text", "null", "null"),
        ("optional", "42", "42"),
        ("optional", "null", None),
        ("optional", '{"a": 1}', '{"a": 1}'),
        ("either", "42", 42),
        ("either", "null", None),
        ("count", "018956", 18956),
        ("count", "many", "many"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("word", "1", "1"),
        ("items", '["1", "2"]', ["1", "2"]),
        ("items", "['1', 'it\\'s']", ["1", "it's"]),
        ("any", "42", 42),
        ("any", "x", "x"),
        ("unknown", "[1", "[1"),
    ],
)
@pytest.mark.parametrize("family", ["MiniMax M2", "MiniMax M3", "MiniCPM5", "Hy3", "Seed-OSS"])
def test_untyped_values_have_the_types_of_the_schema(
    family: str, key: str, written: str, value: object
) -> None:
    format, _, write = FAMILIES[family]
    parsed = PARSER[format].parse(write("", [("f", {key: written})]), [TOOL])
    assert parsed is not None
    assert parsed.calls[0].parse_arguments() == {key: value}


def test_elements_are_lists_or_objects_as_the_schema_says() -> None:
    pairs = (
        "M<pair>M<item>1M</item>M<item>2M</item>M</pair>M<tags>M</tags>M<same>M<k>1M</k>M<k>2M</k>"
    )
    text = f'M<tool_call>M<invoke name="f">{pairs}M</same>M</invoke>M</tool_call>'
    properties = {"pair": {"type": "object"}, "tags": {"type": "array"}}
    tool: Any = {"function": {"name": "f", "parameters": {"properties": properties}}}
    parsed = PARSER["minimax_m3"].parse(text.replace("M<", "]<]minimax[>[<"), [tool])
    assert parsed is not None
    assert parsed.calls[0].parse_arguments() == {
        "pair": {"item": [1, 2]},
        "tags": [],
        "same": {"k": [1, 2]},
    }


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        # Command R+ as in its model card: on the line of the word, closed after a line break.
        (
            "command_r",
            'Action: ```json\n[{"tool_name": "f", "parameters": {"a": 1}}]\n```',
            [("f", {"a": 1})],
        ),
        ("functools", 'functools[\n{"name": "f", "arguments": {}},\n{"name": "g", "arguments": {}}'
         "\n]", [("f", {}), ("g", {})]),
        # Apertus may end its turn instead of the list of calls.
        ("apertus", '<|tools_prefix|>[{"f": {"a": 1}}]', [("f", {"a": 1})]),
        ("granite", '<|tool_call|> [{"arguments": {"a": 1}, "name": "f"}]', [("f", {"a": 1})]),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument '
         'key="a&amp;b" type="string"<|sep|>v<|close|>argument<|sep|><|close|>call<|sep|><|close|>'
         "tools<|sep|>", [("f", {"a&b": "v"})]),
        # Python that models write although it is none.
        ("pythonic", "<|tool_call_start|>[set_date(month=07, day=05)]<|tool_call_end|>",
         [("set_date", {"month": 7, "day": 5})]),
        ("pythonic", "<|tool_call_start|> [label(tags={'a', 'b'})]<|tool_call_end|>",
         [("label", {"tags": ["a", "b"]})]),
        ("pythonic", "<|tool_call_start|>[run(code='a\x00\r\nb')]<|tool_call_end|>",
         [("run", {"code": "a\x00\r\nb"})]),
        ("pythonic", "<|tool_call_start|>[shop.order(items=[{'n': 'x'}])]<|tool_call_end|>",
         [("shop.order", {"items": [{"n": "x"}]})]),
        ("olmo3", r"<function_calls>f(city='Martha\'s', unit='\"c\"')</function_calls>",
         [("f", {"city": "Martha's", "unit": '"c"'})]),
        ("olmo3", "<function_calls>f(a=null, b=true, c={}, d=[])</function_calls>",
         [("f", {"a": None, "b": True, "c": {}, "d": []})]),
        ("hy3", "<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", [("now", {})]),
        ("functionary_3_2", '>>>f\n{"a": 1}', [("f", {"a": 1})]),
    ],
)  # fmt: skip
def test_documented_variants_are_read(format: str, text: str, calls: list[Any]) -> None:
    parsed = PARSER[format].parse(text)
    assert parsed is not None
    assert [(call.name, call.parse_arguments()) for call in parsed.calls] == calls


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("functionary_3_2", "all\n>>> f(1)\n2"),  # a session of Python
        ("functionary_3_2", "f\n{"),
        ("functionary_3_2", "all\nf\n{}"),
        ("command_r", "Action: wait."),
        ("command_r", 'Action:\n```json\n[{"tool_name": "f"}]\n```'),
        ("functools", "functools is a module of Python"),
        ("kimi", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": '),
        ("minimax_m3", "M<tool_call>M<invoke name='f'>M</invoke>M</tool_call>"),
        ("minimax_m3", 'M<tool_call>M<invoke name="f">M<a>1M</b>M</invoke>M</tool_call>'),
        ("minimax_m3", 'M<tool_call>M<invoke name="f">xM<a>1M</a>M</invoke>M</tool_call>'),
        ("minicpm5", '<function name="f"><param>1</param></function>'),
        ("granite", '[{"name": "f", "arguments": {}}]'),
        ("olmo3", "[f(a=1)]"),  # without its tags, so a stream sends it as text
    ],
)
def test_malformed_variants_are_content(format: str, text: str) -> None:
    assert PARSER[format].parse(text.replace("M<", "]<]minimax[>[<")) is None
