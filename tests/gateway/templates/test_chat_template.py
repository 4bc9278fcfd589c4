"""Tokenizers and chat templates as model folders hold them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.models.real_templates import template_of
from whet.errors import ConfigError, RequestError
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.models.catalog import TINY

ASK = Message("user", "What is 2 + 3?")
MORE = Message("user", "And 4 + 4?")
ANSWER = Message("assistant", "It is 5.")
CALLED = Message("assistant", "", (ToolCall("call_1", "calculator", '{"expression": "2"}'),))
RESULT = Message("tool", "5", tool_call_id="call_1")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE = ChatTemplate(TINY)


def renderer_of(folder: Path, source: str) -> Renderer:
    return Renderer(template_of(folder, "own", source))


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TEMPLATE.decode_all(TEMPLATE.encode(text)) == text


def test_special_tokens_are_decoded_only_where_they_are_wanted() -> None:
    ids = TEMPLATE.encode("<|im_start|>user\nZürich 🙂<|im_end|>")
    assert TEMPLATE.decode(ids) == "user\nZürich 🙂"
    assert TEMPLATE.decode_all(ids) == "<|im_start|>user\nZürich 🙂<|im_end|>"
    assert TEMPLATE.get_token_text(ids[0]) == "<|im_start|>"


def test_a_second_template_serves_every_conversation_about_tools(tmp_path: Path) -> None:
    """Also one that came without tools: the plain template would leave the calls out."""
    template_of(tmp_path, "own", CHATML)  # for its tokenizer
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "additional_chat_templates").mkdir()
    tool_use = (TINY / "chat_template.jinja").read_text()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    both = Renderer(ChatTemplate(tmp_path))
    assert both.renders_tools
    text = both.template.decode_all(both.render_full([ASK, CALLED, RESULT], []).ids)
    assert "calculator" in text


def test_a_generation_tag_is_its_body(tmp_path: Path) -> None:
    source = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    marked, plain = renderer_of(tmp_path, source), renderer_of(tmp_path, CHATML)
    assert marked.render_full([ASK, ANSWER, MORE], []) == plain.render_full([ASK, ANSWER, MORE], [])


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        renderer_of(tmp_path, "{% if %}")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        ChatTemplate(tmp_path / "nowhere", CHATML)


@pytest.mark.parametrize("written", ["x | truncate(1)", "x.y.z", "x + 1", "1 / 0", "x[9:0:0]"])
def test_any_error_in_a_template_is_a_request_error(written: str) -> None:
    source = "{% set x = messages[0].content %}{{ " + written + " }}"
    template = ChatTemplate(TINY, source)
    with pytest.raises(RequestError, match="the chat template refuses this conversation: "):
        template.render([Message("user", "A long text")], (), add_generation_prompt=True)
