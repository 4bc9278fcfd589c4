"""Real chat templates, each with a tokenizer in which its markers are special tokens."""

import ast
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, files
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import JsonValue
from tokenizers import AddedToken, Tokenizer

from whet.gateway.graph import Turn
from whet.gateway.messages import Message
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import RenderedPrompt, Renderer
from whet.gateway.templates.suffix import Mismatch
from whet.models.catalog import TINY
from whet.models.smollm2 import TOOL_USE
from whet.types import AttemptId, Call, CallId, Generation, Sampling

MARKERS = re.compile(
    r"<\|[^\s|<>{}]{1,40}\|>"  # <|im_start|>
    r"|<\uff5c[^\s<>{}]{1,40}\uff5c>"  # DeepSeek
    r"|<\|[a-z_]{1,20}>|<[a-z_]{1,20}\|>|<\|\"\|>"  # Gemma 4
    r"|<(?:start|end)_of_\w+>|</?think>|</?tool_(?:call|response)>|</?arg_(?:key|value)>"
    r"|</s>|\[/?[A-Z_]{3,20}\]|<sop>|\[gMASK\]"
)

EOS = {
    "gptoss": "<|return|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "gemma": "<eos>",
    "glm": "<|endoftext|>",
    "llama3": "<|eot_id|>",
    "llama4": "<|eot|>",
    "llava": "</s>",
    "phi": "<|endoftext|>",
    "qwen": "<|im_end|>",
    "nemotron": "<|im_end|>",
    "lfm2": "<|im_end|>",
    "muse": "<|eot|>",
    "smolvlm": "<end_of_utterance>",
    "idefics": "<end_of_utterance>",
    "diffusion": "<eos>",
    "mistral": "</s>",
}
"""As in the tokenizer_config.json of each family."""
TESTS = Path(__file__).parents[2]


@cache
def trl_templates() -> dict[str, str]:
    """The templates in the trl package by name; none of its code is imported."""
    try:
        found = [file for file in files("trl") or [] if file.suffix == ".jinja"]
    except PackageNotFoundError:
        return {}
    return {file.stem: Path(str(file.locate())).read_text() for file in found}


@cache
def all_templates() -> dict[str, str]:
    """The templates of trl, of transformers' code, and of this repository.

    transformers has three, as strings of its processors; those of other models are on the Hub.
    """
    package = Path(str(distribution("transformers").locate_file("transformers")))
    of_transformers = {
        f"{name.removeprefix('processing_')}_of_transformers": source
        for name, source in _find_templates(package.glob("models/*/processing_*.py")).items()
    }
    own = {"tiny": TINY / "chat_template.jinja", "smollm2": TOOL_USE}
    return {
        **trl_templates(),
        **of_transformers,
        **{name: file.read_text() for name, file in own.items()},
        **_find_templates(sorted(TESTS.rglob("test_*.py"))),
    }


def _find_templates(code: Iterable[Path]) -> dict[str, str]:
    """Chat templates among the strings of Python files, by the file and a number."""
    found: dict[str, str] = {}
    for file in code:
        text = file.read_text()
        if "{%" not in text:
            continue
        nodes = [*ast.walk(ast.parse(text))]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            match node:
                case ast.Constant(value=str(source)) if id(node) not in docstrings:
                    if "{%" in source and " in messages" in source:
                        count = sum(name.startswith(file.stem) for name in found)
                        found[file.stem + (f"_{count + 1}" if count else "")] = source
                case _:
                    pass
    return found


def template_of(folder: Path, name: str, source: str) -> ChatTemplate:
    """The template with a small tokenizer, in which each marker of its family is one token."""
    eos = next((token for family, token in EOS.items() if name.startswith(family)), "<|im_end|>")
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    markers = dict.fromkeys(["<bos>", eos, *MARKERS.findall(source)])
    tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in markers])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate(folder, source)


@cache
def real_renderer(name: str) -> Renderer:
    """The renderer of a template of trl, or of the tiny model; made once, since none changes."""
    if name == "tiny":
        return Renderer(ChatTemplate(TINY))
    with TemporaryDirectory() as folder:
        return Renderer(template_of(Path(folder), name, trl_templates()[name]))


def continue_turn(
    renderer: Renderer,
    before: Sequence[Message],
    turn: Message,
    after: Sequence[Message],
    tools: Sequence[JsonValue] = (),
    *,
    sampled: Sequence[int] | None = None,
    text: str | None = None,
) -> RenderedPrompt | Mismatch:
    """The renderer's text after a turn.

    `sampled` are its ids, by default up to its end; `text` is its prompt, by default a full render.
    """
    if sampled is None:
        end = renderer.find_turn_end(turn, after)
        sampled = [] if end is None else [end]
    path = [turn_of(turn, sampled, context=before)]
    if text is None:
        text = renderer.render_full(before, tools, now=0.0).text
    return renderer.render_suffix(path, after, tools, text)


def turn_of(
    message: Message, tokens: Sequence[int], *, context: Sequence[Message] = (), id: str = "a"
) -> Turn:
    """A stored turn: what a model sampled, and the message it was read as."""
    sampled = Generation(
        tokens=tuple(tokens),
        logprobs=(0.0,) * len(tokens),
        versions=(0,) * len(tokens),
        stop="stop",
        sampling=Sampling(),
        message=message.to_json(),
    )
    call = Call(
        id=CallId(id),
        attempt=AttemptId("r/1"),
        parent=None,
        root="",
        messages=tuple(m.to_json() for m in context),
        prompt_suffix=(),
        prompt_length=0,
        prompt_digest="",
        generations=(sampled,),
        created=0.0,
    )
    return Turn(call.generation_id(0), call, tuple(context), message, sampled)
