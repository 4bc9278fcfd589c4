"""Dialogues as rows: the template's own tokens, a mask over what a model would sample, errors."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from support.models.real_templates import template_of, trl_templates
from whet.app.supervised.dialogues import imitate, load_dialogues, load_pairs, prefer
from whet.errors import ConfigError
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.models.catalog import TINY
from whet.training.supervised import SupervisedExample
from whet.types import Row

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
PLAIN = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello, you."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]
WITH_TOOL = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]
THINKING = [m | ({"reasoning_content": "Hm."} if m["role"] == "assistant" else {}) for m in PLAIN]


@pytest.fixture(scope="module")
def tiny() -> Renderer:
    return Renderer(ChatTemplate(TINY))


def example(renderer: Renderer, **value: object) -> SupervisedExample:
    [dialogue] = load_dialogues([value])
    return imitate(dialogue, renderer)


def texts(row: Row, template: ChatTemplate) -> list[str]:
    return [template.decode_all(row.tokens[s.start : s.end]) for s in row.segments]


def test_assistant_turns_are_trained_up_to_the_token_that_ends_them(tiny: Renderer) -> None:
    [row] = example(tiny, messages=PLAIN).rows
    whole = tiny.template.render(
        [m for d in load_dialogues([{"messages": PLAIN}]) for m in d.messages],
        (),
        add_generation_prompt=False,
    )
    assert list(row.tokens) == tiny.template.encode(whole.rstrip("\n"))
    assert texts(row, tiny.template) == ["Hello, you.<|im_end|>", "It is 4.<|im_end|>"]


def test_each_turn_follows_the_prompt_that_a_gateway_sends(tiny: Renderer) -> None:
    [dialogue] = load_dialogues([{"messages": WITH_TOOL, "tools": [TOOL]}])
    [row] = imitate(dialogue, tiny).rows
    for index, segment in zip((1, 3), row.segments, strict=True):
        served = tiny.render_full(dialogue.messages[:index], dialogue.tools).ids
        assert list(row.tokens[: segment.start]) == served
    call, answer = texts(row, tiny.template)
    assert '"name": "add", "arguments": {"a": 2}' in call
    assert answer == "It is 4.<|im_end|>"


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        *[(name, PLAIN) for name in ("cohere", "gemma", "glm4moe", "lfm2", "llama3", "phi3")],
        *[(name, PLAIN) for name in ("qwen2_5", "qwen3", "qwen3_instruct_2507")],
        *[(name, THINKING) for name in ("qwen3", "qwen3_6")],
    ],
)
def test_masks_are_those_of_trls_generation_blocks(
    name: str, messages: list[dict[str, str]], tmp_path: Path
) -> None:
    source = trl_templates()[f"{name}_training"]
    template = template_of(tmp_path, name, source)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(json.loads((tmp_path / "tokenizer_config.json").read_text()))
    [row] = example(Renderer(template), messages=messages).rows
    expected: Any = tokenizer.apply_chat_template(
        messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = expected["input_ids"]
    marked = {place for place, is_marked in enumerate(expected["assistant_masks"]) if is_marked}
    trained = {place for s in row.segments for place in range(s.start, s.end)}
    shared = min(len(ids), len(row.tokens))
    assert list(row.tokens[:shared]) == ids[:shared]
    # TRL also marks what follows the end of a turn, and for GLM not the end itself.
    assert trained - marked <= {s.end - 1 for s in row.segments}
    assert not template.decode([ids[place] for place in marked - trained]).strip()


def test_a_template_that_drops_earlier_thinking_makes_a_row_for_each_turn(tmp_path: Path) -> None:
    template = template_of(tmp_path, "qwen3", trl_templates()["qwen3"])
    first, second = example(Renderer(template), messages=THINKING).rows
    assert texts(first, template) == ["<think>\nHm.\n</think>\n\nHello, you.<|im_end|>"]
    assert texts(second, template) == ["<think>\nHm.\n</think>\n\nIt is 4.<|im_end|>"]
    assert "Hm." not in template.decode_all(second.tokens[: second.segments[0].start])


def test_a_turn_of_weight_0_is_context(tiny: Renderer) -> None:
    messages = [PLAIN[0], PLAIN[1] | {"weight": 0}, *PLAIN[2:]]
    [row] = example(tiny, messages=messages).rows
    assert texts(row, tiny.template) == ["It is 4.<|im_end|>"]
    assert row.tokens == example(tiny, messages=PLAIN).rows[0].tokens


def test_a_completion_is_trained_and_its_prompt_is_not(tiny: Renderer) -> None:
    by_text = example(tiny, prompt="2 + 2?", completion="It is 4.")
    by_messages = example(tiny, prompt=[PLAIN[2]], completion=[PLAIN[3]])
    assert [row.tokens for row in by_text.rows] == [row.tokens for row in by_messages.rows]
    assert texts(by_text.rows[0], tiny.template) == ["It is 4.<|im_end|>"]


def test_pairs_of_trl_and_of_openai_are_the_same(tiny: Renderer) -> None:
    prompt, chosen, rejected = "2 + 2?", "It is 4.", "It is 5."
    [trl] = load_pairs([{"prompt": prompt, "chosen": chosen, "rejected": rejected}])
    user = {"role": "user", "content": prompt}
    sides = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    [explicit] = load_pairs([{"chosen": [user, *sides[0]], "rejected": [user, *sides[1]]}])
    openai = {
        "input": {"messages": [user], "tools": []},
        "preferred_output": sides[0],
        "non_preferred_output": sides[1],
    }
    [preferred] = load_pairs([openai])
    found = [prefer(pair, tiny) for pair in (trl, explicit, preferred)]
    assert len({(e.rows[0].tokens, e.rejected[0].tokens) for e in found}) == 1
    assert texts(found[0].rejected[0], tiny.template) == ["It is 5.<|im_end|>"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 is not JSON"),
        ("[]", "line 2: expected a JSON object, found []"),
        (
            '{"text": "x"}',
            "line 2: expected 'messages', or 'prompt' and 'completion', found 'text'",
        ),
        ('{"messages": "x"}', "line 2: expected 'messages' to be a list of messages, found 'x'"),
        (
            '{"messages": [{"role": "bot", "content": "x"}]}',
            "line 2: messages.0.role: input",
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            "line 2: there is no assistant",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "line 2: messages.0.content",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "x", "weight": 2}]}',
            "line 2: messages.0.weight: expected 0 or 1, found 2",
        ),
        ('{"messages": [{"role": "assistant", "content": "x"}], "tools": [{}]}', "line 2: tools.0"),
        (
            '{"messages": [{"role": "assistant", "content": "\\udcff"}]}',
            "line 2 is not JSON in UTF-8: 'utf-8' codec can't encode character '\\udcff'",
        ),
    ],
)
def test_bad_data_is_one_line_with_file_and_line(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": PLAIN}) + f"\n{line}\n")
    with pytest.raises(ConfigError) as found:
        load_dialogues(file)
    assert str(found.value).startswith(f"{str(file)!r} {message}")
    assert "\n" not in str(found.value)


def test_columns_that_are_not_read_may_be_of_any_type() -> None:
    row: Any = {"messages": PLAIN, "created": date(2026, 1, 1), "image": b"\xff"}
    assert load_dialogues([row]) == load_dialogues([{"messages": PLAIN}])


def test_an_object_that_is_not_json_is_refused() -> None:
    pair: Any = {"prompt": "x", "chosen": {"role": "assistant", "content": {1}}, "rejected": "z"}
    with pytest.raises(ConfigError, match="pair 1 is not JSON in UTF-8: Object of type set is not"):
        load_pairs([pair])


def test_a_pair_names_what_is_missing_or_equal(tiny: Renderer) -> None:
    with pytest.raises(ConfigError, match="pair 1: expected 'prompt', 'chosen' and 'rejected'"):
        load_pairs([{"prompt": "x", "chosen": "y"}])
    [pair] = load_pairs([{"prompt": "x", "chosen": "y", "rejected": "y"}])
    with pytest.raises(ConfigError, match="pair 1: chosen and rejected are the same"):
        prefer(pair, tiny)


def test_text_that_the_template_would_lose_or_cut_is_refused(tiny: Renderer) -> None:
    with pytest.raises(ConfigError, match=r"message 2: .* does not write the 'reasoning_content'"):
        example(tiny, messages=THINKING)
    cut = [PLAIN[0], {"role": "assistant", "content": "a<|im_end|>b"}]
    with pytest.raises(ConfigError, match=r"message 2: the turn contains '<\|im_end\|>'"):
        example(tiny, messages=cut)


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    messages = [PLAIN[0], {"role": "assistant", "content": "a\u2028b"}]
    file.write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    [dialogue] = load_dialogues(file)
    assert dialogue.messages[1].content == "a\u2028b"
