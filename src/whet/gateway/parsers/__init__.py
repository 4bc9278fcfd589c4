"""Tool calls and thinking in sampled text: a small class per format, chosen by the template."""

from whet.gateway.parsers.gemma import GemmaParser
from whet.gateway.parsers.headed import ATEM, HARMONY
from whet.gateway.parsers.hermes import HermesParser
from whet.gateway.parsers.llama import LlamaParser
from whet.gateway.parsers.mistral import MistralParser
from whet.gateway.parsers.parser import Parsed, ToolParser
from whet.gateway.parsers.pythonic import BARE_PYTHONIC, LFM2, LFM2_OLD
from whet.gateway.parsers.reasoning import Reasoning, choose_reasoning
from whet.gateway.parsers.sectioned import DEEPSEEK, KIMI
from whet.gateway.parsers.tagged import GLM, QWEN_XML

__all__ = ["PARSERS", "Parsed", "Reasoning", "ToolParser", "choose_parser", "choose_reasoning"]

PARSERS: tuple[ToolParser, ...] = (
    HARMONY,
    ATEM,
    DEEPSEEK,
    KIMI,
    GemmaParser(),
    GLM,
    QWEN_XML,
    MistralParser(),
    LFM2,
    LFM2_OLD,
    BARE_PYTHONIC,
    LlamaParser(),
    HermesParser(),
)
"""The narrower first: several formats share a tag. The last is also the default."""


def choose_parser(source: str) -> ToolParser:
    """The format a model writes its calls in, by what its chat template says of them."""
    found = (parser for parser in PARSERS if all(mark in source for mark in parser.format.marks))
    return next(found, PARSERS[-1])
