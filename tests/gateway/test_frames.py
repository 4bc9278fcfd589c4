"""Tails put together from frames are those the template gives, whatever is said in them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue
from real_templates import template_of, trl_templates
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from whet.errors import RequestError
from whet.gateway.frames import frame_of, join
from whet.gateway.messages import Message, Role, ToolCall
from whet.gateway.parsers import choose_parser, choose_reasoning
from whet.gateway.parsers.headed import HeadedParser
from whet.gateway.seams import Seams
from whet.gateway.sketch import Slot
from whet.gateway.tails import TOOL, Tails
from whet.gateway.template import NO_ARGUMENTS, ChatTemplate
from whet.policies.catalogue import TINY

NAMES = ["tiny", *sorted(trl_templates())]
OTHER_TOOL: JsonValue = {"type": "function", "function": {"name": "clock", "parameters": {}}}


class Counted(ChatTemplate):
    """A template that counts how often it is rendered."""

    renderings = 0

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, JsonValue] = NO_ARGUMENTS,
    ) -> str:
        self.renderings += 1
        return super().render(
            messages, tools, add_generation_prompt=add_generation_prompt, arguments=arguments
        )


class Both:
    """The tails of a template, from frames and in full."""

    def __init__(self, template: Counted) -> None:
        self.template = template
        parser, reasoning = choose_parser(template.source), choose_reasoning(template.source)
        words = (*parser.format.tokens, reasoning.open, reasoning.close)
        headed = isinstance(parser, HeadedParser)
        self.tails = Tails(template, {}, tools=True, syntax=() if headed else words)

    def after(
        self, turn: Message, messages: Sequence[Message], tools: Sequence[JsonValue] = ()
    ) -> list[int] | str:
        try:
            return self.tails.after(turn, messages, tools)
        except RequestError as error:
            return str(error)

    def in_full(
        self, turn: Message, messages: Sequence[Message], tools: Sequence[JsonValue] = ()
    ) -> list[int] | str:
        told, self.template.tells_time = self.template.tells_time, True
        try:
            return self.after(turn, messages, tools)
        finally:
            self.template.tells_time = told

    def check(
        self, turn: Message, messages: Sequence[Message], tools: Sequence[JsonValue] = ()
    ) -> bool:
        """Compare, and say whether the template was left alone."""
        before = self.template.renderings
        found = self.after(turn, messages, tools)
        alone = self.template.renderings == before
        assert found == self.in_full(turn, messages, tools)
        return alone


def both_of(folder: Path, source: str, name: str = "own") -> Both:
    return Both(cast(Counted, template_of(folder, name, source, Counted)))


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    folder = tmp_path_factory.mktemp("templates")

    @cache
    def get(name: str) -> Both:
        if name == "tiny":
            return Both(Counted(TINY))
        return both_of(folder / name, trl_templates()[name], name)

    return get


def answered(*calls: str) -> Message:
    made = tuple(ToolCall(id, "calculator", '{"expression": "2"}') for id in calls)
    return Message("assistant", "" if calls else "It is 5.", made)


def result(content: str, id: str) -> Message:
    return Message("tool", content, tool_call_id=id)


# ---------------------------------------------------------------------------- every template

PIECES = [
    *(" ", "\n", "\t", "\u00a0", "\u2028", "a", "5", "Zürich", "東京", "🙂", "e\u0301", "\x00"),
    *('"', "\\", "<", ">", "&", "{", "}", "{{ x }}", "%s", "|", "'", "[", "]", "\r", "\ufeff"),
    *("<think>", "</think>", "<tool_response>", "</tool_response>", "<tool_call>"),
]


def contents(marks: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts with marks of the template in them, whole and in part."""
    broken = [
        part for mark in marks for part in (mark, mark[:-1], mark[1:], mark[: len(mark) // 2])
    ]
    pieces = st.sampled_from(PIECES) | st.sampled_from(broken) | st.text(max_size=3)
    return st.just("") | st.lists(pieces, max_size=6).map("".join)


ROLES: Sequence[Sequence[Role]] = (
    ("user",),
    ("user", "user"),
    ("system", "user"),
    ("assistant", "user"),
    ("system",),
)


@st.composite
def tails(
    draw: st.DrawFn, marks: Sequence[str]
) -> tuple[Message, list[Message], Sequence[JsonValue]]:
    """A turn, what follows it, and tools."""
    texts = contents(marks)
    ids = draw(st.lists(st.sampled_from(["call_1", "call_2", "c" * 29]), max_size=3))
    tools = draw(st.sampled_from([(), (TOOL,), (TOOL, OTHER_TOOL)]))
    messages = [result(draw(texts), id) for id in ids if draw(st.integers(0, 9))]
    if not ids or draw(st.integers(0, 3)) == 0:
        messages += [Message(role, draw(texts)) for role in draw(st.sampled_from(ROLES))]
    return answered(*ids), messages, tools


def plain(messages: Sequence[Message]) -> list[Message]:
    """The same messages with nothing special in them."""
    return [message._replace(content="word" if message.content else "") for message in messages]


def compare(both: Both, data: st.DataObject) -> None:
    turn, messages, tools = data.draw(tails([*both.template.special.values()][-12:]))
    for _ in range(2):
        both.after(turn, plain(messages), tools)
    both.check(turn, messages, tools)
    both.check(turn, messages, tools)


SETTINGS = settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(data=st.data())
def test_every_template_gives_the_same_tail(
    name: str, named: Callable[[str], Both], data: st.DataObject
) -> None:
    compare(named(name), data)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(SETTINGS, max_examples=100)
@given(data=st.data())
def test_every_template_gives_the_same_tail_at_length(
    name: str, named: Callable[[str], Both], data: st.DataObject
) -> None:
    compare(named(name), data)


USED = ["tiny", "qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "glm4moe", "nemotron_3_nano"]


@pytest.mark.parametrize("name", USED)
def test_usual_tails_are_rendered_twice_and_never_again(
    name: str, named: Callable[[str], Both]
) -> None:
    both = named(name)
    for tools in ((), (TOOL,)):
        for number in range(12):
            user = Message("user", f" And {number}? <|im_end|>\n")
            id = f"call_{number}"
            for turn, after in (
                (answered(), [user]),
                (answered(id), [result(f"{number}\n", id)]),
                (answered(id, f"{id}b"), [result("5", id), result("6", f"{id}b")]),
            ):
                alone = both.check(turn, after, tools)
                refused = isinstance(both.in_full(turn, after, tools), str)
                assert alone or number < 2 or refused


def test_a_template_that_tells_the_time_is_always_asked(tmp_path: Path) -> None:
    both = both_of(tmp_path, CHATML.replace("TEXT", "m.content + strftime_now('%H')"))
    assert not any(both.check(answered(), [Message("user", "Hi.")]) for _ in range(5))


# ---------------------------------------------------------------------------- templates that look

CHATML = (
    "{% macro same(x) %}{{ x }}{% endmacro %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'user' %}{{ TEXT }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = ["abc", "b", " b ", "", "x<y", "5", "<a> & 'b'", "HI", "ß", "a,b", "b\n", "%s", "2"]

UNFRAMED = [
    "m.content | replace('b', 'c')",
    "m.content | length",
    "m.content | int + 1",
    "m.content | upper",
    "m.content | list | last",
    "m.content | first",
    "m.content | truncate(3)",
    "m.content | safe",
    "m.content | e",
    "m.content | trim('b')",
    "[m.content] | join(',')",
    "[m.content] | map('upper') | join",
    "[m.content] | map('int') | sum",
    "[m.content] | sum",
    "m.content | default('x') | length",
    "m.content | string | length",
    "m | tojson",
    "m | string",
    "m",
    "m.content[:2]",
    "m.content[0]",
    "m.content.split(',')[0]",
    "m.content.strip('b')",
    "m.content.startswith(('a', 'b'))",
    "m.content.upper is defined",
    "m.content in 'abc'",
    "m.content > 'b'",
    "m.content * 2",
    "'%s' % m.content",
    "'%r' % m.content",
    "'%s!' | format(m.content)",
    "'{}'.format(m.content)",
    "'-'.join([m.content, 'x'])",
    "'abcb'.replace(m.content, 'x')",
    "'abcb'.count(m.content)",
    "'abcb'.find(m.content)",
    "{'b': 1}[m.content]",
    "{'b': 1}.get(m.content, 2)",
    "[1, 2, 3][m.content]",
    "m.content is lower",
    "m.content is sameas 'b'",
    "same(m.content).split('b')[0]",
    "(same(m.content) ~ 'x')[:3]",
    "('a' ~ m.content) | trim",
    "('a' + m.content).startswith('aa')",
    "('<' | e) + m.content",
    "m.content + ('<' | e)",
    "(m.content + m.content) | length",
    "messages | selectattr('content', 'equalto', m.content) | list | length",
    "'yes' if m.content ~ m.content else 'no'",
    "dict(a=m.content) | tojson",
    "m.content | tojson(indent=2)",
    "namespace(x=m.content).x | wordcount",
    "range(m.content | length) | list",
    "(messages | map(attribute='content') | list)[-1] | length",
    "messages | map(attribute='content') | map('length') | sum",
    "messages | selectattr('content', 'lower') | list | length",
]
"""None of these can be a frame: the template makes something else of the text."""

FRAMED = [
    "m.content",
    "m.content | trim",
    "m.content.strip()",
    "m.content | tojson",
    "m.content | trim | tojson",
    "m.content | string",
    "m.content | default('x', true)",
    "m.content ~ '!' ~ m.content",
    "'a' + m.content + 'b'",
    "same(m.content) | trim",
    "m.content if m.content else 'none'",
    "m.content if m.content | trim else 'blank'",
    "m.content if m.content.startswith('a') else 'x'",
    "m.content if m.content.endswith('b') else 'x'",
    "m.content if 'b' in m.content else 'x'",
    "m.content if same(m.content).startswith('a') else 'x'",
    "'five' if m.content == '5' else m.content",
    "'five' if '5' == m.content else m.content",
    "'five' if m.content is equalto '5' else m.content",
    "'some' if m.content in ['5', '2'] else m.content",
    "m.content if m.content is string else 'x'",
    "m.content if m.content is iterable and m.content is sequence else 'x'",
    "'x' if m.content is mapping or m.content is none or m.content is number else m.content",
    "m.content if m.content == messages[-1].content else 'x'",
    "m.content if m.content != 5 else 'x'",
    "m.content if m == messages[-1] else 'x'",
    "(messages | map(attribute='content') | list)[-1]",
    "(m.content ~ m.content) is true or (m.content ~ m.content)",
]
"""A frame for each answer to what these ask."""


def uses(both: Both, said: Sequence[str]) -> int:
    """Compare for each text after each other, and count those for which nothing was rendered."""
    asked = [text for text in said for _ in range(3)] + [*said]
    return sum(both.check(answered(), [Message("user", text)]) for text in asked)


@pytest.mark.parametrize("looks", UNFRAMED)
def test_a_template_that_makes_something_of_a_text_is_always_asked(
    looks: str, tmp_path: Path
) -> None:
    both = both_of(tmp_path, CHATML.replace("TEXT", looks))
    some = [text for text in SAID if text]
    uses(both, some)
    assert uses(both, some) == 0


@pytest.mark.parametrize("asks", FRAMED)
@pytest.mark.parametrize("order", [1, -1])
def test_a_template_that_asks_about_a_text_has_a_frame_for_each_answer(
    asks: str, order: int, tmp_path: Path
) -> None:
    assert uses(both_of(tmp_path, CHATML.replace("TEXT", asks)), SAID[::order]) > len(SAID)


@pytest.mark.parametrize(
    "block",
    [
        "{% for c in m.content %}{{ c }}-{% endfor %}",
        "{% for c in m.content %}{% else %}none{% endfor %}",
        "{% autoescape true %}{{ m.content }}{% endautoescape %}",
        "{% filter upper %}{{ m.content }}{% endfilter %}",
        "{% set x %}{{ m.content }}{% endset %}{% if x.isdigit() %}n{% endif %}{{ x }}",
        "{% set x %}{{ m.content }}{% endset %}{{ x | length }}",
        "{% set ns = namespace(x='') %}{% for n in messages %}{% set ns.x = ns.x ~ n.content %}"
        "{% endfor %}{{ ns.x | length }}",
    ],
)
def test_a_block_that_looks_at_a_text_is_never_framed_wrongly(block: str, tmp_path: Path) -> None:
    uses(both_of(tmp_path, CHATML.replace("{{ TEXT }}", block)), SAID)


NAMING = CHATML.replace(
    "{{ m.content }}{% endif %}",
    "{% if m.role == 'tool' %}SHOWN {% for n in messages %}{% for c in n.tool_calls or [] %}"
    "{% if c.id == m.tool_call_id %}{{ c.function.name }}{% endif %}{% endfor %}{% endfor %}: "
    "{% endif %}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ m.content }}{% endif %}",
).replace("TEXT", "m.content")


@pytest.mark.parametrize(
    ("shown", "framed"),
    [
        ("", True),
        ("{{ m.tool_call_id }}", True),
        ("{{ m.tool_call_id[:6] }}", False),
        ("{{ m.tool_call_id | length }}", False),
    ],
)
def test_ids_of_calls_are_written_as_they_are(shown: str, framed: bool, tmp_path: Path) -> None:
    both = both_of(tmp_path, NAMING.replace("SHOWN", shown))
    used = 0
    for number in range(12):
        first, second = f"call_{number}", f"{number * 7}_llac"
        turn = answered(first, second)
        turn = turn._replace(
            tool_calls=(turn.tool_calls[0]._replace(name="clock"), turn.tool_calls[1])
        )
        for ids in ((first, second), (second, first), (first, first), (first, "unknown")):
            used += both.check(turn, [result("5", id) for id in ids])
    assert bool(used) == framed


def test_tools_that_differ_by_order_or_type_alone_are_told_apart(tmp_path: Path) -> None:
    source = CHATML.replace("TEXT", "(tools | tojson if tools else '') + m.content")
    both = both_of(tmp_path, source)
    ones: Sequence[JsonValue] = (1, True, 1.0)
    one_way: list[JsonValue] = [{"name": "f", "n": one} for one in ones]
    other_way: list[JsonValue] = [{"n": one, "name": "f"} for one in ones]
    kinds = [(tool,) for tool in (*one_way, *other_way)]
    for _ in range(4):
        found = [both.after(answered(), [Message("user", "Hi.")], tools) for tools in kinds]
        assert len({str(ids) for ids in found}) == len(kinds)
    assert both.check(answered(), [Message("user", "Ho.")], kinds[0])


# ---------------------------------------------------------------------------- seams

START, END = "<|start|>", "<|end|>"
ODD = [
    AddedToken("<|end|>x", normalized=False),
    AddedToken("y<|start|>", normalized=False),
    AddedToken("<|", normalized=False),
    AddedToken("|><", normalized=False),
    AddedToken("\n<", normalized=False),
    AddedToken("<|end|>", normalized=False, lstrip=True),
    AddedToken("<|start|>", normalized=False, rstrip=True),
    AddedToken("<|end|>", normalized=True),
    AddedToken("<|end|>", normalized=False, single_word=True),
    AddedToken("user", normalized=False, single_word=True),
    AddedToken("\n", normalized=False),
    AddedToken("  ", normalized=False, lstrip=True, rstrip=True),
    AddedToken("é", normalized=True),
]


def tokenizers() -> list[Tokenizer]:
    """Tokenizers with strange tokens, and some that treat the beginning of a text specially."""

    def make() -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in (START, END)])
        return tokenizer

    made = [make() for _ in range(len(ODD) + 5)]
    for tokenizer, odd in zip(made, ODD, strict=False):
        tokenizer.add_tokens([odd])
    first, bert, prefix, prepend, cut = made[len(ODD) :]
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bert.normalizer = normalizers.BertNormalizer()
    prefix.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    prepend.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.NFKC()])
    cut.enable_truncation(5)
    return made


TOKENIZERS = tokenizers()
LAYOUTS = [
    [f"{END}\n{START}user\n", Slot(0), f"{END}\n{START}assistant\n"],
    [END, Slot(0), START, Slot(1), f"user {END}"],
    [f"{END}{START}", Slot(0), Slot(1), "user"],
    [f"{END}\n", Slot(0), f" {END} user {START}\n", Slot(1)],
    [f"{END}\n{START}assistant\n"],
]


@pytest.mark.parametrize("number", range(len(TOKENIZERS)))
@settings(SETTINGS, max_examples=25)
@given(data=st.data())
def test_parts_that_are_encoded_one_by_one_give_the_ids_of_the_whole(
    number: int, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[number]
    marks = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    texts = data.draw(st.tuples(contents(marks), contents(marks)))
    parts = data.draw(st.sampled_from(LAYOUTS))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    frame = frame_of(parts, [], Seams(tokenizer), encode)
    assert frame.ids(texts, encode) == encode(join(parts, texts))


def test_what_stands_around_a_text_is_encoded_once() -> None:
    tokenizer = TOKENIZERS[len(ODD)]
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return tokenizer.encode(text, add_special_tokens=False).ids

    frame = frame_of(LAYOUTS[0], [], Seams(tokenizer), encode)
    del encoded[:]
    assert frame.ids(["Hi."], encode)
    assert encoded == [f"{START}user\nHi."]
