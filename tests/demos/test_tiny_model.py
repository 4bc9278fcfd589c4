"""Abilities of the shipped model: see `src/whet/demos/tiny/README.md`."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import whet
from whet.demos.problems import CALCULATOR, EXAMPLE, SYSTEM, problems, use_tool

TINY = Path(whet.__file__).parent / "demos" / "tiny"
CHAT = [{"role": "system", "content": SYSTEM}, *EXAMPLE, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True, padding_side="left")


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True).eval()


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 8_000_000


def test_the_model_is_tiny_and_in_full_precision(model: Any, tokenizer: Any) -> None:
    assert 800_000 < model.num_parameters() < 1_600_000
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_digits_and_tags_are_single_tokens(tokenizer: Any) -> None:
    for text in (*"0123456789", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(text)) == 1
    tokens = tokenizer.tokenize("Mia955y has 12+345")
    assert [token for token in tokens if re.search(r"\d", token)] == list("95512345")


def test_tags_of_a_call_survive_decoding_and_those_of_a_turn_do_not(tokenizer: Any) -> None:
    ids = tokenizer.encode("<tool_call>\n{}\n</tool_call><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>\n{}\n</tool_call>"


@pytest.mark.parametrize("text", ["plain text", "Ünïcödé 語 🎈", ' {"a":\n [1.5, -2]}  \n', ""])
def test_text_survives_encoding_by_either_library(tokenizer: Any, text: str) -> None:
    raw = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert tokenizer.encode(text) == raw.encode(text).ids
    assert raw.decode(raw.encode(text).ids) == text


@pytest.mark.parametrize("tools", [None, [CALCULATOR]])
def test_rendering_more_messages_only_appends(tokenizer: Any, tools: Any) -> None:
    texts = [render(tokenizer, CHAT[:count], tools=tools) for count in range(1, len(CHAT) + 1)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
        assert shorter.endswith("<|im_end|>\n")
    prompt = render(tokenizer, CHAT[:2], tools=tools, add_generation_prompt=True)
    assert texts[2].startswith(prompt)
    assert prompt.endswith("<|im_start|>assistant\n")


def test_tools_and_calls_are_rendered(tokenizer: Any) -> None:
    assert render(tokenizer, CHAT[:4], tools=[CALCULATOR]) == (
        "<|im_start|>system\nUse the calculator, then answer.\n"
        '{"name": "calculator", "description": "Evaluates arithmetic.", '
        '"parameters": {"expression": {"type": "string"}}}<|im_end|>\n'
        "<|im_start|>user\nTom has 12 pens and buys 32 more. How many pens does Tom have now?"
        "<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "calculator", "arguments": {"expression": "12+32"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n44<|im_end|>\n"
    )


def test_arguments_may_be_an_object_and_calls_may_be_several(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
    message = {"role": "assistant", "content": "Well.", "tool_calls": [call, call]}
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>'
    expected = f"<|im_start|>assistant\nWell.\n{text}\n{text}<|im_end|>\n"
    assert render(tokenizer, [message]) == expected


def test_a_tool_without_parameters_and_content_in_parts_are_rendered(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tool = {"type": "function", "function": {"name": "now"}}
    assert render(tokenizer, [{"role": "user", "content": parts}], tools=[tool, tool]) == (
        '<|im_start|>system\n{"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}}'
        "<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
    )


@torch.inference_mode()
def replies(model: Any, tokenizer: Any, chats: list[list[dict[str, Any]]], tools: Any) -> list[str]:
    texts = [render(tokenizer, chat, tools=tools, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    output = model.generate(**batch, do_sample=False, max_new_tokens=40)
    return tokenizer.batch_decode(output[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


def test_it_chats_a_little(model: Any, tokenizer: Any) -> None:
    questions = ["Who are you?", "Repeat exactly: Mia955y", "What is the capital of Peru?"]
    chats = [[{"role": "user", "content": text}] for text in questions]
    answers = replies(model, tokenizer, chats, None)
    assert answers == ["I am whet-tiny, a very small language model.", "Mia955y", "It is Lima."]


def test_its_ability_leaves_something_to_learn(model: Any, tokenizer: Any) -> None:
    tasks = problems("test", 60, 0)
    system = {"role": "system", "content": SYSTEM}
    chats = [[system, {"role": "user", "content": task["question"]}] for task in tasks]
    answers = replies(model, tokenizer, chats, [CALCULATOR])
    called = [i for i, text in enumerate(answers) if text.startswith("<tool_call>")]
    for i in called:
        call = json.loads(answers[i].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        result = use_tool(call["name"], json.dumps(call["arguments"]))
        chats[i] += [
            {"role": "assistant", "content": answers[i]},
            {"role": "tool", "content": result},
        ]
    for i, text in zip(
        called, replies(model, tokenizer, [chats[i] for i in called], [CALCULATOR]), strict=True
    ):
        answers[i] = text
        assert chats[i][-1]["content"] in text  # it reads the calculator's result
    right = sum(
        re.findall(r"-?\d+", text)[-1:] == [str(task["answer"])]
        for text, task in zip(answers, tasks, strict=True)
    )
    assert 0.2 <= right / len(tasks) <= 0.5
