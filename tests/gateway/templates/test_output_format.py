"""The format of a model's answers and calls, detected in its chat template."""

from pathlib import Path

import pytest
from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.constraint import Constraint
from whet.gateway.templates.output_format import CallFormat, OutputFormat, detect_output_format
from whet.gateway.templates.renderer import Renderer
from whet.models.catalog import TINY

ADD: dict[str, JsonValue] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def test_the_format_of_calls_is_detected_in_the_template(renderer: Renderer) -> None:
    output = detect_output_format(renderer)
    assert output.answer == ("", "")
    assert output.thinking is None
    assert output.calls == CallFormat(
        before='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        separator='}\n</tool_call>\n<tool_call>\n{"name": "',
        after="}\n</tool_call>",
    )


def detect(folder: Path, source: str) -> OutputFormat:
    """Detect the output format of a template, with the tiny model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((TINY / name).read_text())
    (folder / "chat_template.jinja").write_text(source)
    return detect_output_format(Renderer(ChatTemplate(folder)))


TURNS = """
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


@pytest.mark.parametrize(
    "call",
    [
        "",
        "<function={{ c.function.name }}>{{ c.function.arguments.expression }}</function>",
        # No parser reads this format.
        "{{ c.function.name }}: {{ c.function.arguments | tojson }}",
        "{{ raise_exception('no calls') }}",
    ],
)
def test_calls_in_an_unknown_format_cannot_be_forced(tmp_path: Path, call: str) -> None:
    output = detect(tmp_path, TURNS.replace("CALL", call))
    assert output.calls is None
    assert output.answer == ("", "")
    with pytest.raises(RequestError, match="arguments as JSON"):
        Constraint(tools=(ADD,)).to_grammar(output)


def test_only_one_call_is_forced_where_the_template_takes_no_more(tmp_path: Path) -> None:
    call = (
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{# ipython #}"
    )
    output = detect(tmp_path, TURNS.replace("CALL", call))
    assert output.calls == CallFormat('{"name": "', '", "parameters": ', None, "}")
    assert Constraint(tools=(ADD,)).to_grammar(output).count(" call") == 1


def test_thinking_that_a_template_adds_is_not_part_of_the_format(tmp_path: Path) -> None:
    source = TURNS.replace("{{ m.content }}", "{{ '<think>\n\n</think>\n\n' }}{{ m.content }}")
    output = detect(tmp_path, source.replace("CALL", ""))
    assert output.answer == ("", "")
    assert output.thinking == ("<think>", "</think>")


def test_a_prompt_that_opens_thinking_is_cut_before_it(tmp_path: Path) -> None:
    source = TURNS.replace("assistant\n{% endif", "assistant\n<think>\n{% endif") + "{# </think> #}"
    assert detect(tmp_path, source.replace("CALL", "")).answer == ("", "")
