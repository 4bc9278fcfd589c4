"""Real chat templates: what is found out about each, and that continuing them is exact."""

from pathlib import Path

import pytest
from real_templates import EOS, template_of, trl_templates, turn_of

from whet.gateway.messages import Message, ToolCall
from whet.gateway.render import Renderer
from whet.gateway.tails import TOOL
from whet.gateway.template import ChatTemplate
from whet.policies.catalogue import SMOLLM2, TINY, models_dir
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


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    folder = tmp_path_factory.mktemp("templates")
    return {n: Renderer(template_of(folder / n, n, s)) for n, s in trl_templates().items()}


def test_there_are_at_least_25_real_templates() -> None:
    assert len(NAMES) >= 25


@pytest.mark.parametrize("name", NAMES)
def test_every_verdict_is_the_known_one_and_has_a_cause(
    name: str, renderers: dict[str, Renderer]
) -> None:
    verdict = renderers[name].verdict
    assert verdict.mode == ("per-call" if name in PER_CALL else "merged")
    assert bool(verdict.causes) == (verdict.mode == "per-call")
    assert bool(verdict.failed) == (verdict.mode == "per-call")
    drops = "before_last_user" if name in DROPS_BEFORE_LAST_USER else "never"
    if name.startswith("nemotron"):
        drops = "before_last_user"
    if name in PER_CALL or name == "gemma4_v2":
        drops = "always"
    assert verdict.drops_thinking == drops
    assert verdict.parser == PARSERS.get(name, verdict.parser)


@pytest.mark.parametrize("name", NAMES)
def test_sampling_stops_only_where_a_turn_ends(name: str, renderers: dict[str, Renderer]) -> None:
    renderer = renderers[name]
    stops = {renderer.template.token_text(id) for id in renderer.stop_ids}
    assert renderer.verdict.close in stops or name.startswith(("gptoss", "glm"))
    assert not stops & ({*renderer.parser.format.tokens} - {"<|call|>", "<|return|>", "<|eot|>"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thought", ["", "Let me think."])
def test_a_tool_loop_continued_turn_by_turn_is_the_whole_render(
    name: str, thought: str, renderers: dict[str, Renderer]
) -> None:
    """Each turn is replaced by what the template writes for it, so the ids must be equal."""
    renderer = renderers[name]
    if not renderer.renders_tools:
        pytest.skip("the template shows no tools")
    messages = [SYSTEM, ASK]
    stored = renderer.whole(messages, [TOOL])
    for number in range(5):
        turn, after = calling(number, thought), [result(number)]
        sampled = _as_written(renderer, stored, [*messages, turn, *after])
        refused = renderer.refuses([turn_of(turn, sampled)], after)
        if refused:
            assert refused is Fork.THINKING_DROPPED
            return
        stored += sampled
        stored += renderer.tail(after, [TOOL], closed=True, turn=turn)
        messages += [turn, *after]
        assert stored == _whole(renderer, messages)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thought", ["", "Let me think."])
def test_a_dialogue_continued_turn_by_turn_is_the_whole_render(
    name: str, thought: str, renderers: dict[str, Renderer]
) -> None:
    renderer = renderers[name]
    messages = [ASK]
    stored = renderer.whole(messages, [])
    for text in ("It is 5 °C.", "It\nis **10** °C 🙂", "I do not know, sin"):
        turn = Message("assistant", text, reasoning=thought if renderer.reasoning.open else "")
        sampled = _as_written(renderer, stored, [*messages, turn, AGAIN], tools=False)
        refused = renderer.refuses([turn_of(turn, sampled)], [AGAIN])
        if refused:
            assert refused in (Fork.THINKING_DROPPED, Fork.TEMPLATE)
            return
        tail = renderer.tail([AGAIN], [], closed=True, turn=turn)
        if text.endswith("sin"):  # cut short: what closes the turn is context
            closing = renderer.tail([AGAIN], [], closed=False, turn=turn)
            sampled = sampled[: len(sampled) + len(tail) - len(closing)]
            tail = closing
        stored += [*sampled, *tail]
        messages += [turn, AGAIN]
        assert stored == _whole(renderer, messages, tools=False)


def _whole(renderer: Renderer, messages: list[Message], *, tools: bool = True) -> list[int]:
    text = renderer.template.render(messages, [TOOL] if tools else [], add_generation_prompt=True)
    return renderer.template.encode(text)


def _as_written(
    renderer: Renderer, prompt: list[int], messages: list[Message], *, tools: bool = True
) -> list[int]:
    """The ids the template itself gives a turn: between its prompt and its tail."""
    turn, after = messages[-2], messages[-1:]
    whole = _whole(renderer, messages, tools=tools)
    tail = renderer.tail(after, [TOOL] if tools else [], closed=True, turn=turn)
    return whole[len(prompt) : len(whole) - len(tail)]


def test_shipped_and_cached_models_are_merged() -> None:
    folders = [TINY, models_dir() / SMOLLM2]
    for folder in folders:
        if (folder / "tokenizer.json").exists():
            verdict = Renderer(ChatTemplate(folder)).verdict
            assert (verdict.mode, verdict.tools, verdict.parser) == ("merged", True, "hermes")


KEPT = ["qwen3_6", "lfm2_2_5", "nemotron_3_nano"]


@pytest.mark.parametrize("name", KEPT)
def test_a_template_that_can_keep_thinking_does_so_when_told(name: str, tmp_path: Path) -> None:
    template = template_of(tmp_path, name, trl_templates()[name])
    assert Renderer(template).verdict.drops_thinking == "before_last_user"
    assert Renderer(template, keep_thinking=True).verdict.drops_thinking == "never"


def test_templates_find_their_form_of_messages(renderers: dict[str, Renderer]) -> None:
    ask = [ASK, calling(1), result(1)]
    for name in ("smolvlm", "llava_next", "idefics3"):  # content as a list of parts
        assert "Zürich" in renderers[name].template.render([ASK], [], add_generation_prompt=True)
    text = renderers["deepseekv3"].template.render(ask, [], add_generation_prompt=True)
    assert '{"expression": "1 + 1"}' in text  # arguments as text
    thought = renderers["gptoss"].template.render(
        [ASK, calling(1, "Hm."), result(1)], [TOOL], add_generation_prompt=True
    )
    assert "<|channel|>analysis<|message|>Hm.<|end|>" in thought  # thinking by another name


def test_every_family_has_an_end_token() -> None:
    assert all(any(name.startswith(family) for family in EOS) for name in NAMES)
