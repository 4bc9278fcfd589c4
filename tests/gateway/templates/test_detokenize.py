"""Sampled ids to messages, whole and as a stream."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from support.models.real_templates import real_renderer, template_of, trl_templates
from whet.gateway.templates.chat_template import find_byte_ids
from whet.gateway.templates.detokenize import (
    Delta,
    IncrementalDecoder,
    StreamDecoder,
    decode_message,
)
from whet.gateway.templates.renderer import Renderer
from whet.types import Sampling

FAMILIES = (
    *("qwen3", "qwen3_5_think", "qwen3_5_nothink", "gptoss", "gemma4_v5", "glm4moe", "llama3_1"),
    *("lfm2_2_5", "deepseekv3", "muse_glimmer", "nemotron_3_nano", "cohere2"),
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def decode(renderer: Renderer, text: str, *, tools: bool = True, stop: tuple[str, ...] = ()):
    ids = renderer.template.encode(text)
    return decode_message(renderer, ids, Sampling(stop=stop), parse_calls=tools)


def test_thinking_is_separated_from_content() -> None:
    message = decode(real_renderer("qwen3"), "<think>\nHm.\n</think>\n\nIt is 5.<|im_end|>")
    assert (message.reasoning, message.content) == ("Hm.", "It is 5.")


def test_a_turn_that_only_closes_thinking_has_none() -> None:
    message = decode(real_renderer("qwen3"), "</think>\n\nIt is 5.<|im_end|>")
    assert (message.reasoning, message.content) == ("", "It is 5.")


def test_thinking_that_the_prompt_opened_is_separated() -> None:
    message = decode(real_renderer("qwen3_5_think"), "Hm.\n</think>\n\nIt is 5.<|im_end|>")
    assert (message.reasoning, message.content) == ("Hm.", "It is 5.")


def test_a_prompt_shows_whether_thinking_was_opened() -> None:
    renderer = real_renderer("qwen3_5_think")
    ids = renderer.template.encode("It is 5.")
    prompt = renderer.template.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    plain = decode_message(renderer, ids, Sampling(), parse_calls=False, prompt=prompt)
    assert (plain.reasoning, plain.content) == ("", "It is 5.")
    opened = decode_message(renderer, ids, Sampling(), parse_calls=False, prompt=prompt[:-4])
    assert (opened.reasoning, opened.content) == ("It is 5.", "")


def test_thinking_left_open_in_an_earlier_turn_is_not_this_turns() -> None:
    renderer = real_renderer("qwen3")
    before = (
        "<think>\nHm, let<|im_end|>\n<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n"
    )
    assert not renderer.ends_in_thinking(renderer.template.encode(before))
    assert renderer.ends_in_thinking(renderer.template.encode(before + "<think>\n"))


def test_thinking_that_was_cut_short_is_all_thinking() -> None:
    message = decode(real_renderer("qwen3"), "<think>\nHm, let me see")
    assert (message.reasoning, message.content) == ("Hm, let me see", "")


def test_a_template_without_thinking_leaves_think_tags_in_the_content() -> None:
    message = decode(real_renderer("tiny"), "<think>Hm.</think>5")
    assert (message.reasoning, message.content) == ("", "<think>Hm.</think>5")


def test_thinking_then_text_then_a_call() -> None:
    message = decode(
        real_renderer("qwen3"), f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}<|im_end|>"
    )
    assert (message.reasoning, message.content) == ("Hm.", "Let me see.")
    assert [call.name for call in message.tool_calls] == ["f"]


def test_a_malformed_call_is_content() -> None:
    message = decode(real_renderer("tiny"), "Well: <tool_call>{oops}</tool_call>")
    assert message.content == "Well: <tool_call>{oops}</tool_call>"
    assert message.tool_calls == ()


def test_special_tokens_that_no_parser_needs_are_removed() -> None:
    llama = real_renderer("llama3_1")
    assert decode(llama, "Hello<|start_header_id|> there<|eot_id|>").content == "Hello there"
    assert decode(llama, "<|python_tag|>oops<|eot_id|>").content == "oops"


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("qwen2_5", "a</tool<tool_call>_call>b", "a</tool_call>b"),
        ("gptoss", "a<|call<|channel|>|>b", "a<|call|>b"),
        ("gptoss", "a<|chan<|call|>nel|>b", "a<|channel|>b"),
    ],
)
def test_what_removed_tokens_leave_together_is_not_removed(
    name: str, text: str, content: str
) -> None:
    assert decode(real_renderer(name), text).content == content


def test_calls_are_not_parsed_unless_there_are_tools() -> None:
    assert decode(real_renderer("tiny"), CALL, tools=False).tool_calls == ()


def test_harmony_channels_are_separated() -> None:
    head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    with_text = "<|channel|>final<|message|>It is 5.<|return|>"
    harmony = real_renderer("gptoss")
    called, answered = decode(harmony, head + call), decode(harmony, head + with_text)
    assert (called.reasoning, called.content, called.tool_calls[0].name) == ("Hm.", "", "f")
    assert (answered.reasoning, answered.content, answered.tool_calls) == ("Hm.", "It is 5.", ())
    assert decode(harmony, head + call, tools=False).content == '{"a": 1}'
    assert decode(harmony, "no header at all").content == "no header at all"


def test_a_raw_request_gets_all_of_its_text() -> None:
    renderer = real_renderer("qwen3_5_think")
    ids = renderer.template.encode("2 + 3 = 5, since")
    message = decode_message(renderer, ids, Sampling(), parse_calls=False, as_text=True)
    assert (message.content, message.reasoning) == ("2 + 3 = 5, since", "")


def test_a_stop_string_ends_the_text() -> None:
    assert decode(real_renderer("tiny"), "one two three", stop=("thr", " tw")).content == "one"


def test_a_stream_keeps_back_only_what_it_must() -> None:
    renderer = real_renderer("qwen3")
    stream = StreamDecoder(renderer, Sampling(), parse_calls=True)

    def sent(text: str) -> Delta:
        return stream.feed(renderer.template.encode(text))

    assert sent("<think>") == Delta()
    assert sent("\nTwo") == Delta(reasoning="Two")
    assert sent(" and three.\n") == Delta(reasoning=" and three.")
    assert sent("</think>\n\n") == Delta()
    assert sent("Hello") == Delta("Hello")
    assert sent("\n") == Delta()
    assert sent("you") == Delta("\nyou")
    assert sent("<tool_call>") == Delta()
    assert sent("more") == Delta()


PIECES = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "<think>\n", "\n</think>\n\n", "\n", " ", "Hm", "5", "é🙂"),
            *(
                "<tool_call>",
                "</tool_call>",
                CALL,
                "<function=f>",
                '{"name": "f", "parameters": {}}',
            ),
            *("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|call|>"),
            *("<|channel|>final<|message|>", "<|channel|>commentary to=functions.f<|message|>{}"),
            *(" to=self<|message|>", "<|eom|>", "<|message|>", "<|im_end|>", "<|python_tag|>"),
            *("<|channel>thought\n", "<channel|>", "<|tool_call>call:f{}", "<tool_call|>"),
            *("[f(a=1)]", "<|tool_call_start|>", "<|tool_call_end|>", "[", "{", "STOP", "ST", "<"),
        ]
    ),
    max_size=14,
)
RAW = st.lists(st.integers(0, 1279), max_size=20)


@pytest.mark.parametrize("name", [*FAMILIES, "tiny"])
@settings(max_examples=40)
@given(
    pieces=PIECES,
    raw=RAW,
    cuts=st.lists(st.integers(0, 60), max_size=12),
    tools=st.booleans(),
    stop=st.sampled_from([(), ("STOP",), ("m5", "<")]),
    as_text=st.booleans(),
)
def test_however_ids_are_cut_a_stream_adds_up_to_the_whole_message(
    name: str,
    pieces: list[str],
    raw: list[int],
    cuts: list[int],
    tools: bool,
    stop: tuple[str, ...],
    as_text: bool,
) -> None:
    renderer = real_renderer(name)
    ids = renderer.template.encode("".join(pieces))
    ids[len(ids) // 2 : len(ids) // 2] = raw
    sampling = Sampling(stop=stop)
    whole = decode_message(renderer, ids, sampling, parse_calls=tools, as_text=as_text)
    stream = StreamDecoder(renderer, sampling, parse_calls=tools, as_text=as_text)
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    deltas = [stream.feed(ids[a:b]) for a, b in pairwise(edges)]
    deltas.append(stream.finish(whole))
    assert "".join(delta.content for delta in deltas) == whole.content
    assert "".join(delta.reasoning for delta in deltas) == whole.reasoning


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["<s>", "\u2581", "\u2581\u2581\u2581", "\u2581the", "a", "é", "\u2581\ufffd", "\n"]
SPACES, STRIP = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
DECODERS = {
    "llama": decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse(), STRIP]),
    "gemma": decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
}


def sentencepiece(name: str) -> Tokenizer:
    """A tokenizer with the decoder of a family, whose first ids are the 256 bytes."""
    ids = {token: id for id, token in enumerate([*BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = DECODERS[name]
    return tokenizer


def test_ids_of_bytes_are_those_that_are_decoded_as_bytes() -> None:
    assert find_byte_ids(sentencepiece("llama")) == frozenset(range(256))
    assert find_byte_ids(sentencepiece("metaspace")) == frozenset()
    assert real_renderer("tiny").template.byte_ids == frozenset()


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=100)
@given(
    parts=st.lists(
        st.one_of(
            st.lists(st.integers(0, 255 + len(WORDS)), max_size=6),
            st.text(max_size=12).map(lambda text: list(text.encode(errors="replace"))),
        ),
        max_size=8,
    )
)
@example(parts=[[0x63, 0x9B, 0x20]])
@example(parts=[list(("\u65e5\u672c\u8a9e" * 3).encode()), [260], list("\u65e5".encode()) * 3])
def test_ids_decoded_one_by_one_are_the_text_of_all(name: str, parts: list[list[int]]) -> None:
    tokenizer, ids = sentencepiece(name), [id for part in parts for id in part]
    decoder = IncrementalDecoder(
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        find_byte_ids(tokenizer),
    )
    texts = [decoder.feed([id]) for id in ids]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert whole.startswith("".join(texts))
    assert "".join(texts) + decoder.finish() == whole


def test_bytes_that_are_no_text_are_sent_as_they_come() -> None:
    template = real_renderer("tiny").template
    half = next(id for id in range(1000) if template.decode_all([id]) == "\ufffd")
    decoder = IncrementalDecoder(template.decode_all, template.byte_ids)
    assert [decoder.feed([half]) for _ in range(100)] == ["", *["\ufffd"] * 99]
    assert decoder.finish() == "\ufffd"


def test_an_empty_generation_is_an_empty_message(tmp_path: Path) -> None:
    renderer = Renderer(template_of(tmp_path, "qwen2_5", trl_templates()["qwen2_5"]))
    assert decode(renderer, "").content == ""


RECIPIENTS = """
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == "assistant" %}{% if m.content %}{{ ">>>all\n" + m.content }}{% endif -%}
{%- for c in m.tool_calls or [] %}{{ ">>>" + c.function.name + "\n" + c.function.arguments }}
{%- endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n>>>" }}{% endif -%}
"""
"""A template in which a turn names its recipients, as functionary 3.2 does."""


@pytest.mark.parametrize("tools", [True, False])
def test_the_recipient_of_an_answer_is_not_part_of_it(tmp_path: Path, tools: bool) -> None:
    renderer = Renderer(template_of(tmp_path, "qwen", RECIPIENTS))
    assert renderer.report.parser == "functionary_3_2"
    assert renderer.report.mode == "merged"
    message = decode(renderer, "all\nIt is all\n5.<|im_end|>", tools=tools)
    assert (message.content, message.tool_calls) == ("It is all\n5.", ())
    ids = renderer.template.encode('all\nLet me see.>>>f\n{"a": 1}<|im_end|>')
    whole = decode_message(renderer, ids, Sampling(), parse_calls=tools)
    assert len(whole.tool_calls) == tools
    assert whole.content.startswith("Let me see.")
    for at in range(len(ids)):
        stream = StreamDecoder(renderer, Sampling(), parse_calls=tools)
        deltas = [stream.feed(ids[:at]), stream.feed(ids[at:]), stream.finish(whole)]
        assert "".join(delta.content for delta in deltas) == whole.content
