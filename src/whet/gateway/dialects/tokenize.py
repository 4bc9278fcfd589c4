"""vLLM's `/tokenize` and `/detokenize`."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from whet.errors import RequestError
from whet.gateway.dialects.chat import ChatMessage, ChatTool, to_canonical
from whet.gateway.dialects.dialect import Json
from whet.gateway.dialects.wire import Tools, Wire
from whet.gateway.templates.chat_template import ChatTemplate


class TokenizeRequest(Wire):
    """A prompt, or messages with their tools."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    tools: Tools[ChatTool] = ()
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    # Accepted only with values that change nothing.
    add_special_tokens: Literal[False] | None = None
    continue_final_message: Literal[False] | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None

    def build_reply(self, template: ChatTemplate, context_length: int | None) -> Json:
        """Return the ids, their number, and the context length of the model."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt: expected either a prompt or messages")
        text = self.prompt or ""
        if self.messages is not None:
            text = template.render(
                [to_canonical(message, index) for index, message in enumerate(self.messages)],
                [each.to_canonical() for each in self.tools],
                add_generation_prompt=self.add_generation_prompt,
            )
        ids = template.encode(text)
        reply: Json = {"count": len(ids), "max_model_len": context_length, "tokens": [*ids]}
        reply["token_strs"] = (
            [template.get_token_text(id) for id in ids] if self.return_token_strs else None
        )
        return reply


class DetokenizeRequest(Wire):
    """Token ids to decode."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]

    def build_reply(self, template: ChatTemplate) -> Json:
        """Return the text of the ids, with special tokens."""
        return {"prompt": template.decode_all(self.tokens)}
