"""The tool-call and thinking formats of models, chosen by what the chat template contains."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from whet.gateway.parsers.gemma import GemmaParser
from whet.gateway.parsers.harmony import ATEM, HARMONY
from whet.gateway.parsers.json_calls import HERMES, JSON_CALLS, LlamaParser, MistralParser
from whet.gateway.parsers.minimax_m3 import MinimaxM3Parser
from whet.gateway.parsers.parser import NoParser, ToolParser
from whet.gateway.parsers.pythonic import PYTHONIC
from whet.gateway.parsers.sections import DEEPSEEK, FUNCTIONARY, FUNCTIONARY_32, KIMI, SOLAR
from whet.gateway.parsers.xml_tags import GLM, QWEN_XML, XML_TAGS

PARSERS: tuple[ToolParser, ...] = (
    *(HARMONY, ATEM, DEEPSEEK, KIMI, SOLAR, GemmaParser()),
    MinimaxM3Parser(),
    *XML_TAGS,
    *(GLM, QWEN_XML, MistralParser()),
    *PYTHONIC,
    *JSON_CALLS,
    *(LlamaParser(), HERMES, FUNCTIONARY, FUNCTIONARY_32),
)
"""The more specific first, since several formats share a tag."""
NO_PARSER = NoParser()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format in which thinking stands first in a turn, between two tags."""

    name: str
    open: str = ""
    close: str = ""
    template_marks: Sequence[str] = ()
    """Texts that are all in the chat template of a model with this format."""

    def build_pattern(self) -> re.Pattern[str] | None:
        """Pattern of thinking and white space in a prompt, which may end inside a block."""
        if not self.open:
            return None
        open, close = re.escape(self.open), re.escape(self.close)
        return re.compile(rf"{open}.*?(?:{close}|\Z)|\s+", re.DOTALL)

    def ends_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside a thinking block, so that the turn starts there."""
        return bool(self.open) and prompt.rstrip().endswith(self.open.rstrip())

    def ends_closed(self, prompt: str) -> bool:
        """Whether a prompt ends with a closed thinking block, so that the turn has no thinking."""
        return bool(self.open) and prompt.rstrip().endswith(self.close)


NO_REASONING = ReasoningFormat("none")
"""For templates without thinking: all output is content."""

REASONING_FORMATS = (
    ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", ("[THINK]",)),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>", ("</seed:think>",)),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>", ("</mm:think>",)),
    ReasoningFormat("hy3", "<think:opensource>", "</think:opensource>", ("hy_Assistant", "<think")),
    ReasoningFormat(
        "cohere", "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_THINKING|>", "ACTION|>")
    ),
    ReasoningFormat(
        "apertus", "<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_prefix|>", "<|inner_suffix|>")
    ),
    ReasoningFormat(
        "apriel",
        "Here are my reasoning steps:\n",
        "[BEGIN FINAL RESPONSE]",
        ("[BEGIN FINAL RESPONSE]",),
    ),
    ReasoningFormat(
        "solar", "<|think|>", "<|end|><|begin|>assistant", ("<|think|>", "<|tool_calls|>")
    ),
    ReasoningFormat(
        "kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>", ("<|open|>", "<|sep|>")
    ),
    ReasoningFormat("think", "<think>", "</think>", ("</think>",)),
)


def choose_parser(source: str) -> ToolParser:
    """Choose the tool-call parser of a model by the source of its chat template.

    The first that matches; `NO_PARSER` if none does.
    """
    matching = (p for p in PARSERS if all(mark in source for mark in p.format.template_marks))
    return next(matching, NO_PARSER)


def choose_reasoning(source: str) -> ReasoningFormat:
    """Choose the thinking format of a model by the source of its chat template."""
    matching = (f for f in REASONING_FORMATS if all(mark in source for mark in f.template_marks))
    return next(matching, NO_REASONING)
