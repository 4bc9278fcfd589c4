"""When stored tokens are continued, when not, and what is refused rather than left out."""

import logging
from pathlib import Path

import pytest

from support.models.real_templates import continue_turn, template_of, trl_templates, turn_of
from whet.errors import RequestError
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import RenderedPrompt, Renderer
from whet.gateway.templates.suffix import TOOL, Mismatch
from whet.models.catalog import TINY
from whet.types import Fork

ASK = Message("user", "What is 2 + 3?")
MORE = Message("user", "And 4 + 4?")
ANSWER = Message("assistant", "It is 5.")
CALLED = Message("assistant", "", (ToolCall("call_1", "calculator", '{"expression": "2"}'),))
RESULT = Message("tool", "5", tool_call_id="call_1")
THOUGHT = Message("assistant", "It is 5.", reasoning="Two and three.")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tiny() -> Renderer:
    return Renderer(ChatTemplate(TINY))


def renderer_of(folder: Path, source: str, *, keep_thinking: bool = False) -> Renderer:
    return Renderer(template_of(folder, "own", source), keep_thinking=keep_thinking)


def named(folder: Path, name: str, *, keep_thinking: bool = False) -> Renderer:
    template = template_of(folder, name, trl_templates()[name])
    return Renderer(template, keep_thinking=keep_thinking)


def sampled(renderer: Renderer, text: str, end: str | None = None) -> list[int]:
    end = renderer.report.close if end is None else end
    return renderer.template.encode(text + end)


def fork_of(suffix: RenderedPrompt | Mismatch) -> Fork | None:
    return suffix.fork if isinstance(suffix, Mismatch) else None


def ids_of(suffix: RenderedPrompt | Mismatch) -> list[int]:
    assert isinstance(suffix, RenderedPrompt), suffix.cause
    return [*suffix.ids]


def test_a_plain_template_is_continued(tiny: Renderer) -> None:
    ids = sampled(tiny, "It is 5.")
    suffix = ids_of(continue_turn(tiny, [ASK], ANSWER, [MORE], sampled=ids))
    prompt = tiny.render_full([ASK], []).ids
    assert [*prompt, *ids, *suffix] == tiny.render_full([ASK, ANSWER, MORE], []).ids


def test_a_truncated_turn_is_closed_as_context(tiny: Renderer) -> None:
    closed = ids_of(continue_turn(tiny, [ASK], ANSWER, [MORE]))
    cut = sampled(tiny, "It is 5.", end="")
    closing = ids_of(continue_turn(tiny, [ASK], ANSWER, [MORE], sampled=cut))
    assert closing == [tiny.end_of_turn_id, *closed]


def test_a_turn_with_the_text_of_its_end_token_is_not_continued(tiny: Renderer) -> None:
    """Sampled as plain tokens, it ended nothing, but a template cannot tell."""
    end = tiny.report.close
    turn = Message("assistant", f"Write {end} at the end.")
    assert fork_of(continue_turn(tiny, [ASK], turn, [MORE])) is Fork.TEMPLATE
    call = ToolCall("call_1", "calculator", f'{{"a": "x{end}y"}}')
    turn = Message("assistant", "", (call,))
    assert fork_of(continue_turn(tiny, [ASK], turn, [RESULT])) is Fork.TEMPLATE


def test_thinking_that_the_template_would_drop_forks_at_the_next_user_message(
    tmp_path: Path,
) -> None:
    qwen = named(tmp_path, "qwen3")
    thinking = CALLED._replace(reasoning="Hm.")

    def fork(before: list[Message], turn: Message, *after: Message) -> Fork | None:
        return fork_of(continue_turn(qwen, before, turn, after))

    assert fork([ASK], THOUGHT, MORE) is Fork.THINKING_DROPPED
    assert fork([ASK], thinking, RESULT) is None
    assert fork([ASK], thinking, RESULT, MORE) is Fork.THINKING_DROPPED
    assert fork([ASK, thinking, RESULT], ANSWER, MORE) is Fork.THINKING_DROPPED
    assert fork([ASK], ANSWER, MORE) is None


def test_thinking_may_be_kept(tmp_path: Path) -> None:
    qwen = named(tmp_path, "qwen3", keep_thinking=True)
    thinking = CALLED._replace(reasoning="Hm.")
    plain = ids_of(continue_turn(qwen, [ASK], ANSWER, [MORE]))
    assert ids_of(continue_turn(qwen, [ASK], THOUGHT, [MORE])) == plain
    assert ids_of(continue_turn(qwen, [ASK, thinking, RESULT], THOUGHT, [MORE])) == plain


def test_a_prompt_that_opens_thinking_forks_even_where_there_was_none(tmp_path: Path) -> None:
    qwen = named(tmp_path, "qwen3_5_think")
    assert qwen.prompt_opens_thinking
    assert fork_of(continue_turn(qwen, [ASK], ANSWER, [MORE])) is Fork.THINKING_DROPPED


def test_a_turn_that_ended_with_a_token_the_template_never_writes_is_not_continued(
    tmp_path: Path,
) -> None:
    harmony = named(tmp_path, "gptoss")
    returned = sampled(harmony, "<|channel|>final<|message|>It is 5.", "<|return|>")
    assert fork_of(continue_turn(harmony, [ASK], ANSWER, [MORE], sampled=returned)) is Fork.TEMPLATE
    called = sampled(harmony, "{}", "<|call|>")
    assert fork_of(continue_turn(harmony, [ASK], CALLED, [RESULT], sampled=called)) is None


def test_a_turn_that_named_the_wrong_next_role_is_not_continued(tmp_path: Path) -> None:
    glm = named(tmp_path, "glm4moe")
    ids = sampled(glm, "x", "<|observation|>")
    assert fork_of(continue_turn(glm, [ASK], CALLED, [RESULT], sampled=ids)) is None
    assert fork_of(continue_turn(glm, [ASK], ANSWER, [MORE], sampled=ids)) is Fork.TEMPLATE


def test_text_beside_a_call_that_the_template_moves_is_not_continued(tmp_path: Path) -> None:
    gemma = named(tmp_path, "gemma4_v5")
    with_text = Message("assistant", "Let me see.", CALLED.tool_calls)
    suffix = ids_of(continue_turn(gemma, [ASK], CALLED, [RESULT], [TOOL]))
    assert gemma.template.decode_all(suffix).startswith("response:calculator{value:")
    assert fork_of(continue_turn(gemma, [ASK], with_text, [RESULT], [TOOL])) is Fork.TEMPLATE


def test_a_template_that_counts_its_messages_is_one_row_per_call_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        counting = renderer_of(tmp_path, "{{ messages | length }}" + CHATML)
    assert counting.report.mode == "per-call"
    assert "two turns" in counting.report.failed
    assert "one row per call" in caplog.text
    assert fork_of(continue_turn(counting, [ASK], ANSWER, [MORE])) is Fork.TEMPLATE


def test_a_template_without_an_end_of_turn_is_one_row_per_call(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    report = renderer_of(tmp_path, source).report
    assert report.mode == "per-call"
    assert report.causes[0] == "no token ends an assistant turn"


def test_tools_are_refused_where_the_template_shows_none(tmp_path: Path) -> None:
    llama = named(tmp_path, "llama3")
    assert not llama.renders_tools
    with pytest.raises(RequestError, match="does not show tools"):
        llama.render_full([ASK], [TOOL])
    path = [turn_of(ANSWER, sampled(llama, "It is 5."), context=[ASK])]
    with pytest.raises(RequestError, match="does not show tools"):
        llama.render_suffix(path, [MORE], [TOOL])


def test_what_the_template_would_leave_out_is_refused(tmp_path: Path) -> None:
    phi = named(tmp_path / "phi", "phi3")
    with pytest.raises(RequestError, match="tool results"):
        phi.render_full([ASK, CALLED, RESULT], [])
    lfm = named(tmp_path / "lfm", "lfm2")
    with pytest.raises(RequestError, match="tool calls"):
        lfm.render_full([ASK, CALLED, RESULT], [TOOL])
    assert ids_of(continue_turn(lfm, [ASK], CALLED, [RESULT], [TOOL]))


def test_an_error_of_the_template_is_reported_in_its_words(tmp_path: Path) -> None:
    gemma = named(tmp_path, "gemma")
    with pytest.raises(RequestError, match="System role not supported"):
        gemma.render_full([Message("system", "Be brief."), ASK], [])


def test_tools_beside_the_last_user_message_fork_there_and_nowhere_else(tmp_path: Path) -> None:
    """As Mistral's templates do, which also want tool-call ids of nine characters."""
    source = (
        "{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% if tools and m == asked[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
        '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{% endfor %}]</s>'
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}"
        "{% endfor %}"
    )
    mistral = Renderer(template_of(tmp_path, "mistral", source))
    assert (mistral.report.mode, mistral.report.parser) == ("merged", "mistral")
    suffix = ids_of(continue_turn(mistral, [ASK], CALLED, [RESULT], [TOOL]))
    assert mistral.template.decode_all(suffix) == "[TOOL_RESULTS]5[/TOOL_RESULTS]"
    later = continue_turn(mistral, [ASK], CALLED, [RESULT, MORE], [TOOL])
    assert fork_of(later) is Fork.TEMPLATE
    # Without tools nothing is moved, and nothing forks.
    assert fork_of(continue_turn(mistral, [ASK], ANSWER, [MORE])) is None


UNKNOWN_CALLS = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!!{{ c.function.name }}!!{{ c.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_tools_are_refused_where_calls_could_not_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The second has the tag of a known format, but writes something else.
    for number, source in enumerate((UNKNOWN_CALLS, "{# <tool_call> #}" + UNKNOWN_CALLS)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            renderer = renderer_of(tmp_path / str(number), source)
        assert (renderer.report.tools, renderer.report.parser) == (True, "none")
        assert "requests with tools are refused" in caplog.text
        with pytest.raises(RequestError, match="format that is not known"):
            renderer.render_full([ASK], [TOOL])
        assert renderer.render_full([ASK], []).ids


def test_results_carry_the_id_that_the_model_wrote(tmp_path: Path) -> None:
    source = UNKNOWN_CALLS.replace("{{ m.content }}", "{{ m.tool_call_id }}: {{ m.content }}")
    renderer = renderer_of(tmp_path, source.replace("!!{{ c.function.name }}", "{{ c.id }}"))
    call = CALLED.tool_calls[0]._replace(model_id="functions.calculator:0")
    turn = CALLED._replace(tool_calls=(call,))
    suffix = renderer.template.decode_all(ids_of(continue_turn(renderer, [ASK], turn, [RESULT])))
    assert "functions.calculator:0: 5" in suffix
    assert "call_1" not in renderer.render_full([ASK, turn, RESULT], []).text
