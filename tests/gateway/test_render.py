"""When stored tokens are continued, when not, and what is refused rather than left out."""

import logging
from pathlib import Path

import pytest
from real_templates import template_of, trl_templates, turn_of

from whet.errors import ConfigError, RequestError
from whet.gateway.messages import Message, ToolCall
from whet.gateway.render import Renderer
from whet.gateway.tails import TOOL
from whet.gateway.template import ChatTemplate
from whet.policies.catalogue import TINY
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
    end = renderer.verdict.close if end is None else end
    return renderer.template.encode(text + end)


def test_a_plain_template_is_continued(tiny: Renderer) -> None:
    turn = turn_of(ANSWER, sampled(tiny, "It is 5."))
    assert tiny.refuses([turn], [MORE]) is None
    tail = tiny.tail([MORE], [], closed=True, turn=ANSWER)
    prompt = tiny.whole([ASK], [])
    assert [*prompt, *turn.generation.tokens, *tail] == tiny.whole([ASK, ANSWER, MORE], [])


def test_a_truncated_turn_is_closed_as_context(tiny: Renderer) -> None:
    closed = tiny.tail([MORE], [], closed=True, turn=ANSWER)
    assert tiny.tail([MORE], [], closed=False, turn=ANSWER) == [tiny.close_id, *closed]
    assert tiny.refuses([turn_of(ANSWER, sampled(tiny, "It is", end=""))], [MORE]) is None


def test_thinking_that_the_template_would_drop_forks_at_the_next_user_message(
    tmp_path: Path,
) -> None:
    qwen = named(tmp_path, "qwen3")
    thought = turn_of(THOUGHT, sampled(qwen, "<think>\nTwo.\n</think>\n\nIt is 5."))
    called = turn_of(
        Message("assistant", "", CALLED.tool_calls, reasoning="Hm."), sampled(qwen, "<think>")
    )
    plain = turn_of(ANSWER, sampled(qwen, "It is 5."))
    assert qwen.refuses([thought], [MORE]) is Fork.THINKING_DROPPED
    assert qwen.refuses([called], [RESULT]) is None
    assert qwen.refuses([called], [RESULT, MORE]) is Fork.THINKING_DROPPED
    assert qwen.refuses([called, plain], [MORE]) is Fork.THINKING_DROPPED
    assert qwen.refuses([plain], [MORE]) is None


def test_thinking_may_be_kept(tmp_path: Path) -> None:
    qwen = named(tmp_path, "qwen3", keep_thinking=True)
    thought = turn_of(THOUGHT, sampled(qwen, "<think>\nTwo.\n</think>\n\nIt is 5."))
    assert qwen.refuses([thought], [MORE]) is None


def test_a_prompt_that_opens_thinking_forks_even_where_there_was_none(tmp_path: Path) -> None:
    qwen = named(tmp_path, "qwen3_5_think")
    assert qwen.opens_thinking
    assert qwen.refuses([turn_of(ANSWER, sampled(qwen, "</think>5"))], [MORE]) is (
        Fork.THINKING_DROPPED
    )


def test_a_turn_that_ended_with_a_token_the_template_never_writes_is_not_continued(
    tmp_path: Path,
) -> None:
    harmony = named(tmp_path, "gptoss")
    text = "<|channel|>final<|message|>It is 5."
    returned = turn_of(ANSWER, sampled(harmony, text, "<|return|>"))
    assert harmony.refuses([returned], [MORE]) is Fork.TEMPLATE
    called = turn_of(CALLED, sampled(harmony, "{}", "<|call|>"))
    assert harmony.refuses([called], [RESULT]) is None


def test_a_turn_that_named_the_wrong_next_speaker_is_not_continued(tmp_path: Path) -> None:
    glm = named(tmp_path, "glm4moe")
    assert glm.refuses([turn_of(CALLED, sampled(glm, "x", "<|observation|>"))], [RESULT]) is None
    assert glm.refuses([turn_of(ANSWER, sampled(glm, "x", "<|observation|>"))], [MORE]) is (
        Fork.TEMPLATE
    )


def test_text_beside_a_call_that_the_template_moves_is_not_continued(tmp_path: Path) -> None:
    gemma = named(tmp_path, "gemma4_v5")
    end = "<|tool_response>"
    spoken = Message("assistant", "Let me see.", CALLED.tool_calls)
    assert gemma.refuses([turn_of(CALLED, sampled(gemma, "x", end))], [RESULT]) is None
    assert gemma.refuses([turn_of(spoken, sampled(gemma, "x", end))], [RESULT]) is Fork.TEMPLATE
    tail = gemma.tail([RESULT], [TOOL], closed=True, turn=CALLED)
    assert gemma.template.decode_all(tail).startswith("response:calculator{value:")


def test_a_template_that_counts_its_messages_is_one_row_per_call_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        counting = renderer_of(tmp_path, "{{ messages | length }}" + CHATML)
    assert counting.verdict.mode == "per-call"
    assert "two turns" in counting.verdict.failed
    assert "one row per call" in caplog.text
    turn = turn_of(ANSWER, sampled(counting, "It is 5."))
    assert counting.refuses([turn], [MORE]) is Fork.TEMPLATE


def test_a_template_without_an_end_of_turn_is_one_row_per_call(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    verdict = renderer_of(tmp_path, source).verdict
    assert verdict.mode == "per-call"
    assert verdict.causes[0] == "no token ends an assistant turn"


def test_tools_are_refused_where_the_template_shows_none(tmp_path: Path) -> None:
    llama = named(tmp_path, "llama3")
    assert not llama.renders_tools
    with pytest.raises(RequestError, match="does not show tools"):
        llama.whole([ASK], [TOOL])
    with pytest.raises(RequestError, match="does not show tools"):
        llama.tail([MORE], [TOOL], closed=True, turn=ANSWER)


def test_what_the_template_would_leave_out_is_refused(tmp_path: Path) -> None:
    phi = named(tmp_path / "phi", "phi3")
    with pytest.raises(RequestError, match="tool results"):
        phi.whole([ASK, CALLED, RESULT], [])
    lfm = named(tmp_path / "lfm", "lfm2")
    with pytest.raises(RequestError, match="tool calls"):
        lfm.whole([ASK, CALLED, RESULT], [TOOL])
    assert lfm.tail([RESULT], [TOOL], closed=True, turn=CALLED)


def test_what_the_template_says_no_to_is_told_in_its_words(tmp_path: Path) -> None:
    gemma = named(tmp_path, "gemma")
    with pytest.raises(RequestError, match="System role not supported"):
        gemma.whole([Message("system", "Be brief."), ASK], [])


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
    assert (mistral.verdict.mode, mistral.verdict.parser) == ("merged", "mistral")
    called = turn_of(CALLED, sampled(mistral, "x"))
    assert mistral.refuses([called], [RESULT]) is None
    assert mistral.refuses([called], [RESULT, MORE]) is Fork.TEMPLATE
    text = mistral.template.decode_all(mistral.tail([RESULT], [TOOL], closed=False, turn=CALLED))
    assert text == "</s>[TOOL_RESULTS]5[/TOOL_RESULTS]"


def test_a_second_template_serves_every_conversation_about_tools(tmp_path: Path) -> None:
    """Also one that came without tools: the plain template would leave the calls out."""
    template_of(tmp_path, "own", CHATML)  # for its tokenizer
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "additional_chat_templates").mkdir()
    tool_use = (TINY / "chat_template.jinja").read_text()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    both = Renderer(ChatTemplate(tmp_path))
    assert both.renders_tools
    text = both.template.decode_all(both.whole([ASK, CALLED, RESULT], []))
    assert "calculator" in text


def test_a_generation_tag_is_its_body(tmp_path: Path) -> None:
    source = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    marked, plain = renderer_of(tmp_path, source), renderer_of(tmp_path, CHATML)
    assert marked.whole([ASK, ANSWER, MORE], []) == plain.whole([ASK, ANSWER, MORE], [])


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        renderer_of(tmp_path, "{% if %}")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        ChatTemplate(tmp_path / "nowhere", CHATML)


@pytest.mark.parametrize("written", ["x | truncate(1)", "x.y.z", "x + 1", "1 / 0", "x[9:0:0]"])
def test_whatever_goes_wrong_in_a_template_is_a_refusal_of_the_conversation(written: str) -> None:
    source = "{% set x = messages[0].content %}{{ " + written + " }}"
    template = ChatTemplate(TINY, source)
    with pytest.raises(RequestError, match="the chat template refuses this conversation: "):
        template.render([Message("user", "A long text")], (), add_generation_prompt=True)
