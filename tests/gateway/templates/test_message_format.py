"""The message format that a chat template expects, detected by probes."""

from pathlib import Path

import pytest

from support.models.real_templates import template_of, trl_templates
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.suffix import TOOL

ASK = Message("user", "What is the weather in Zürich?")
CALL = Message("assistant", "", (ToolCall("call_1", "calculator", '{"expression": "1 + 1"}'),))
RESULT = Message("tool", "2", tool_call_id="call_1")


@pytest.mark.parametrize("name", ["smolvlm", "llava_next", "idefics3"])
def test_content_is_a_list_of_parts_where_the_template_wants_one(name: str, tmp_path: Path) -> None:
    template = template_of(tmp_path, name, trl_templates()[name])
    assert "Zürich" in template.render([ASK], [], add_generation_prompt=True)


def test_arguments_are_text_where_the_template_wants_text(tmp_path: Path) -> None:
    template = template_of(tmp_path, "deepseekv3", trl_templates()["deepseekv3"])
    text = template.render([ASK, CALL, RESULT], [], add_generation_prompt=True)
    assert '{"expression": "1 + 1"}' in text


def test_thinking_goes_under_the_key_that_the_template_reads(tmp_path: Path) -> None:
    template = template_of(tmp_path, "gptoss", trl_templates()["gptoss"])
    turn = CALL._replace(reasoning="Hm.")
    text = template.render([ASK, turn, RESULT], [TOOL], add_generation_prompt=True)
    assert "<|channel|>analysis<|message|>Hm.<|end|>" in text


def test_ids_are_short_where_the_template_wants_nine_characters(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
        "{{ c.id }} {{ c.function | tojson }}{% endfor %}"
        "{{ m.tool_call_id or '' }} {{ m.content }}<|im_end|>{% endfor %}"
    )
    template = template_of(tmp_path, "own", source)
    text = template.render([ASK, CALL, RESULT], [], add_generation_prompt=True)
    call_id = text.partition("<|im_end|>")[2][:9]
    assert f"<|im_end|>{call_id} 2" in text  # the result names the same call
