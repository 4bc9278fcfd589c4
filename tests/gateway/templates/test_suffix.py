"""The suffix after a turn is the end of a full render, token for token, whatever it contains."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from support.models.real_templates import continue_turn, real_renderer, template_of, trl_templates
from whet.errors import RequestError
from whet.gateway.messages import Message, Role, ToolCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.gateway.templates.suffix import TOOL, Mismatch
from whet.models.catalog import TINY

NAMES = ["tiny", *sorted(trl_templates())]
OTHER_TOOL: JsonValue = {"type": "function", "function": {"name": "clock", "parameters": {}}}
HISTORY = [
    Message("user", "What is 1 + 1?"),
    Message("assistant", "It is 2."),
    Message("user", "And 2 + 3?"),
]


def turn_with_calls(*ids: str) -> Message:
    calls = tuple(ToolCall(id, "calculator", '{"expression": "2"}') for id in ids)
    return Message("assistant", "" if ids else "It is 5.", calls)


def result(content: str, id: str) -> Message:
    return Message("tool", content, tool_call_id=id)


def check_suffix(
    renderer: Renderer,
    turn: Message,
    messages: Sequence[Message],
    tools: Sequence[JsonValue] = (),
) -> bool:
    """Compare with a full render; False if the conversation is refused or starts a new row."""
    try:
        full = renderer.render_full([*HISTORY, turn, *messages], tools, now=0.0).ids
        suffix = continue_turn(renderer, HISTORY, turn, messages, tools)
    except RequestError:
        return False
    if isinstance(suffix, Mismatch):
        return False
    assert full[len(full) - len(suffix.ids) :] == suffix.ids
    return True


# ---------------------------------------------------------------------------- real templates

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
def continuations(
    draw: st.DrawFn, marks: Sequence[str]
) -> tuple[Message, list[Message], Sequence[JsonValue]]:
    """A turn, the messages after it, and tools."""
    texts = contents(marks)
    ids = draw(st.lists(st.sampled_from(["call_1", "call_2", "c" * 29]), max_size=3))
    tools = draw(st.sampled_from([(), (TOOL,), (TOOL, OTHER_TOOL)]))
    messages = [result(draw(texts), id) for id in ids if draw(st.integers(0, 9))]
    if not ids or draw(st.integers(0, 3)) == 0:
        messages += [Message(role, draw(texts)) for role in draw(st.sampled_from(ROLES))]
    return turn_with_calls(*ids), messages, tools


def compare(renderer: Renderer, data: st.DataObject) -> None:
    marks = [*renderer.template.special_tokens.values()][-12:]
    check_suffix(renderer, *data.draw(continuations(marks)))


SETTINGS = settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(data=st.data())
def test_a_suffix_is_the_end_of_a_full_render(name: str, data: st.DataObject) -> None:
    compare(real_renderer(name), data)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(SETTINGS, max_examples=100)
@given(data=st.data())
def test_a_suffix_is_the_end_of_a_full_render_in_many_examples(
    name: str, data: st.DataObject
) -> None:
    compare(real_renderer(name), data)


# ---------------------------------------------------------------------------- ids of calls

SHOWS_CALL_IDS = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{{ m.tool_call_id[:6] }} {{ m.tool_call_id }} "
    "{% for n in messages %}{% for c in n.tool_calls or [] %}"
    "{% if c.id == m.tool_call_id %}{{ c.function.name }}{% endif %}{% endfor %}{% endfor %}: "
    "{% endif %}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_ids_and_names_of_calls_are_those_of_the_turn(tmp_path: Path) -> None:
    renderer = Renderer(template_of(tmp_path, "own", SHOWS_CALL_IDS))
    for number in range(4):
        first, second = f"call_{number}", f"{number * 7}_llac"
        turn = turn_with_calls(first, second)
        clock = turn.tool_calls[0]._replace(name="clock")
        turn = turn._replace(tool_calls=(clock, turn.tool_calls[1]))
        for ids in ((first, second), (second, first), (first, first), (first, "unknown")):
            assert check_suffix(renderer, turn, [result("5", id) for id in ids])


# ---------------------------------------------------------------------------- odd tokenizers

START, END = "<|start|>", "<|end|>"
SOURCE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ODD_TOKENS = [
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


def odd_tokenizers() -> list[Tokenizer]:
    """Tokenizers with strange tokens, and some that treat the start of a text specially."""

    def make() -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in (START, END)])
        return tokenizer

    made = [make() for _ in range(len(ODD_TOKENS) + 4)]
    for tokenizer, odd in zip(made, ODD_TOKENS, strict=False):
        tokenizer.add_tokens([odd])
    first, bert, prefix, prepend = made[len(ODD_TOKENS) :]
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bert.normalizer = normalizers.BertNormalizer()
    prefix.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    prepend.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.NFKC()])
    return made


TOKENIZERS = odd_tokenizers()
PER_CALL = {4, 8}
"""With these, `<|end|>` is not always a token of its own, so nothing may be merged."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Renderer]:
    @cache
    def get(number: int) -> Renderer:
        folder = tmp_path_factory.mktemp("tokenizer")
        TOKENIZERS[number].save(str(folder / "tokenizer.json"))
        config = json.dumps({"eos_token": END})
        (folder / "tokenizer_config.json").write_text(config)
        return Renderer(ChatTemplate(folder, SOURCE))

    return get


@pytest.mark.parametrize("number", range(len(TOKENIZERS)))
@settings(SETTINGS, max_examples=25)
@given(data=st.data())
def test_a_suffix_encoded_alone_gives_the_ids_of_the_whole_text(
    number: int, odd: Callable[[int], Renderer], data: st.DataObject
) -> None:
    renderer = odd(number)
    marks = [token.content for token in TOKENIZERS[number].get_added_tokens_decoder().values()]
    text = data.draw(contents(marks))
    checked = check_suffix(renderer, turn_with_calls(), [Message("user", text)])
    assert checked == (number not in PER_CALL)
