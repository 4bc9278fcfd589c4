"""Real chat templates: the report of each, and that continuing them is exact."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import JsonValue

from support.models.real_templates import (
    EOS,
    continue_turn,
    real_renderer,
    template_of,
    trl_templates,
)
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import RenderedPrompt, Renderer
from whet.gateway.templates.suffix import TOOL, Mismatch
from whet.models.catalog import SMOLLM2, TINY, find_models_dir
from whet.types import Fork

PER_CALL = {"deepseek_r1_distill", "deepseekv3", "deepseekv3_training"}
"""Their prompts open a block of thinking that the template leaves out of every earlier turn."""

DROPS_BEFORE_LAST_USER = (
    {"glm4moe", "glm4moe_training", "gptoss", "gptoss_training", "qwen3"}
    | {"qwen3_5_think", "qwen3_5_nothink", "qwen3_6"}
    | {"lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"}
    | {"gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"}
    | {"diffusion_gemma", "diffusion_gemma_training"}
)
PARSERS = {
    "deepseekv3": "deepseek",
    "gemma4": "gemma4",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "lfm2": "pythonic",
    "lfm2_2_5": "pythonic",
    "llama3_1": "llama3_json",
    "muse_glimmer": "atem",
    "nemotron_3_nano": "qwen_xml",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen_xml",
}
NAMES = sorted(trl_templates())

SYSTEM = Message("system", "Be brief.")
ASK = Message("user", "What is the weather in Zürich?")
AGAIN = Message("user", "And in 東京?")


def calling(number: int, thought: str = "") -> Message:
    call = ToolCall(f"call_{number:024d}", "calculator", f'{{"expression": "{number} + 1"}}')
    return Message("assistant", "", (call,), reasoning=thought)


def result(number: int) -> Message:
    return Message("tool", f"{number + 1}\n", tool_call_id=f"call_{number:024d}")


def test_there_are_at_least_25_real_templates() -> None:
    assert len(NAMES) >= 25


@pytest.mark.parametrize("name", NAMES)
def test_every_report_is_the_known_one_and_has_a_cause(name: str) -> None:
    report = real_renderer(name).report
    assert report.mode == ("per-call" if name in PER_CALL else "merged")
    assert bool(report.causes) == (report.mode == "per-call")
    assert bool(report.failed) == (report.mode == "per-call")
    drops = "before_last_user" if name in DROPS_BEFORE_LAST_USER else "never"
    if name.startswith("nemotron"):
        drops = "before_last_user"
    if name in PER_CALL or name == "gemma4_v2":
        drops = "always"
    assert report.drops_thinking == drops
    assert report.parser == PARSERS.get(name, report.parser)


@pytest.mark.parametrize("name", NAMES)
def test_sampling_stops_only_where_a_turn_ends(name: str) -> None:
    renderer = real_renderer(name)
    stops = {renderer.template.get_token_text(id) for id in renderer.stop_ids}
    assert renderer.report.close in stops or name.startswith(("gptoss", "glm"))
    assert not stops & (
        {*renderer.parser.format.special_tokens} - {"<|call|>", "<|return|>", "<|eot|>"}
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thought", ["", "Let me think."])
def test_a_tool_loop_continued_turn_by_turn_is_the_full_render(name: str, thought: str) -> None:
    """Each turn is replaced by what the template writes for it, so the ids must be equal."""
    renderer = real_renderer(name)
    if not renderer.renders_tools:
        pytest.skip("the template shows no tools")
    messages = [SYSTEM, ASK]
    text, ids = renderer.render_full(messages, [TOOL], now=0.0)
    stored = [*ids]
    for number in range(5):
        turn, after = calling(number, thought), [result(number)]
        suffix = continue_turn(renderer, messages, turn, after, [TOOL], text=text)
        if isinstance(suffix, Mismatch):
            assert suffix.fork is Fork.THINKING_DROPPED
            return
        messages += [turn, *after]
        text = suffix.text
        stored += [*_as_written(renderer, stored, suffix, messages, [TOOL]), *suffix.ids]
        assert stored == _full(renderer, messages, [TOOL])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thought", ["", "Let me think."])
def test_a_dialogue_continued_turn_by_turn_is_the_full_render(name: str, thought: str) -> None:
    renderer = real_renderer(name)
    messages = [ASK]
    stored = [*renderer.render_full(messages, [], now=0.0).ids]
    for text in ("It is 5 °C.", "It\nis **10** °C 🙂", "I do not know, sin"):
        turn = Message("assistant", text, reasoning=thought if renderer.reasoning.open else "")
        # The last one is cut short: what closes the turn is context.
        sampled = [1] if text.endswith("sin") else None
        suffix = continue_turn(renderer, messages, turn, [AGAIN], sampled=sampled)
        if isinstance(suffix, Mismatch):
            assert suffix.fork in (Fork.THINKING_DROPPED, Fork.TEMPLATE)
            return
        messages += [turn, AGAIN]
        stored += [*_as_written(renderer, stored, suffix, messages), *suffix.ids]
        assert stored == _full(renderer, messages)


def _full(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[JsonValue] = ()
) -> list[int]:
    text = renderer.template.render(messages, tools, add_generation_prompt=True, now=0.0)
    return renderer.template.encode(text)


def _as_written(
    renderer: Renderer,
    prompt: Sequence[int],
    suffix: RenderedPrompt,
    messages: Sequence[Message],
    tools: Sequence[JsonValue] = (),
) -> Sequence[int]:
    """The ids the template itself gives a turn: between its prompt and its suffix."""
    full = _full(renderer, messages, tools)
    return full[len(prompt) : len(full) - len(suffix.ids)]


def test_shipped_and_cached_models_are_merged() -> None:
    folders = [TINY, find_models_dir() / SMOLLM2]
    for folder in folders:
        if (folder / "tokenizer.json").exists():
            report = Renderer(ChatTemplate(folder)).report
            assert (report.mode, report.tools, report.parser) == ("merged", True, "hermes")


KEPT = ["qwen3_6", "lfm2_2_5", "nemotron_3_nano"]


@pytest.mark.parametrize("name", KEPT)
def test_a_template_that_can_keep_thinking_keeps_it_on_request(name: str, tmp_path: Path) -> None:
    template = template_of(tmp_path, name, trl_templates()[name])
    assert Renderer(template).report.drops_thinking == "before_last_user"
    assert Renderer(template, keep_thinking=True).report.drops_thinking == "never"


def test_every_family_has_an_end_token() -> None:
    assert all(any(name.startswith(family) for family in EOS) for name in NAMES)
