"""Stored responses, shown again and listed."""

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.asgi import Request
from whet.gateway.dialects.dialect import Json
from whet.gateway.dialects.responses import shown_tools
from whet.gateway.dialects.responses_items import find_response, input_items, output_items
from whet.gateway.dialects.responses_reply import finished, response_object
from whet.gateway.graph import Graph
from whet.gateway.messages import Message
from whet.gateway.template import ChatTemplate


def show_response(graph: Graph, id: str, request: Request, template: ChatTemplate) -> Json:
    """A response as it was given, but for log-probabilities. Raises NotFound."""
    call = find_response(graph, id)
    if request.query("stream", "false") != "false":
        raise RequestError("the field 'stream' is not supported: a stored response comes whole")
    shown = dict(call.origin.shown)
    shown["tools"] = shown_tools(graph, shown)
    [generation] = call.generations
    message = Message.from_json(generation.message)
    output = output_items(call.id, message, whole=generation.stop == "stop")
    response = response_object(call.id, call.created, call.origin.model, shown)
    return finished(response, call, message, template, output)


def list_input(graph: Graph, id: str, request: Request) -> Json:
    """What a response was asked, in one page, the newest first unless asked otherwise."""
    call = find_response(graph, id)
    said = graph.messages(call.id)[bool(call.origin.shown.get("instructions")) : -1]
    items = input_items(call.id, said)
    if request.query("order", "desc") == "desc":
        items.reverse()
    data: list[JsonValue] = [*items]
    ids = [str(item["id"]) for item in items] or [""]
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0],
        "last_id": ids[-1],
        "has_more": False,
    }
