"""Names of spans and attributes, as Agent Lightning 0.3 writes them."""

from enum import Enum
from typing import Any, cast

AGL_ANNOTATION = "agentlightning.annotation"
AGL_MESSAGE = "agentlightning.message"
AGL_OBJECT = "agentlightning.object"
AGL_EXCEPTION = "agentlightning.exception"
AGL_OPERATION = "agentlightning.operation"
AGL_REWARD = "agentlightning.reward"
AGL_VIRTUAL = "agentlightning.virtual"


class LightningSpanAttributes(Enum):
    """Attributes of spans."""

    REWARD = "agentlightning.reward"
    LINK = "agentlightning.link"
    TAG = "agentlightning.tag"
    MESSAGE_BODY = "agentlightning.message.body"
    OBJECT_TYPE = "agentlightning.object.type"
    OBJECT_LITERAL = "agentlightning.object.literal"
    OBJECT_JSON = "agentlightning.object.json"
    OPERATION_NAME = "agentlightning.operation.name"
    OPERATION_INPUT = "agentlightning.operation.input"
    OPERATION_OUTPUT = "agentlightning.operation.output"


Attributes = dict[str, Any]  # Any: strings, numbers, booleans, and lists of one of them


def flatten_attributes(value: object, prefix: str = "", *, expand: bool = False) -> Attributes:
    """Flatten nested data to dotted keys; a list of one primitive type is a leaf unless `expand`.

    Raises:
        ValueError: a key is not a string.
    """
    if isinstance(value, dict):
        items = [(key, item) for key, item in cast(dict[object, object], value).items()]
        for key, _ in items:
            if not isinstance(key, str):
                raise ValueError(f"attributes need string keys; found {key!r} in {prefix!r}")
    elif isinstance(value, list) and (expand or not prefix or not _is_leaf(cast(Any, value))):
        items = list(enumerate(cast(list[object], value)))
    else:
        return {prefix: value}
    flat: Attributes = {}
    for key, item in items:
        flat |= flatten_attributes(item, f"{prefix}.{key}" if prefix else str(key), expand=expand)
    return flat


def unflatten_attributes(attributes: Attributes, prefix: str) -> Any:
    """Rebuild the nested data below a prefix: a list if every key is a number, else a dict."""
    tree: dict[str, Any] = {}
    for key, value in attributes.items():
        if not key.startswith(f"{prefix}."):
            continue
        *path, last = key.removeprefix(f"{prefix}.").split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return _convert_lists(tree)


def sanitize_attributes(attributes: Attributes) -> Attributes:
    """Convert values that are not attributes to strings. None is left out."""
    return {
        key: value if isinstance(value, (str, int, float, bool, list)) else str(value)
        for key, value in attributes.items()
        if value is not None
    }


def make_tag_attributes(tags: list[str]) -> Attributes:
    """Return the attributes that tag a span."""
    return flatten_attributes({LightningSpanAttributes.TAG.value: tags}, expand=True)


def make_link_attributes(links: dict[str, str]) -> Attributes:
    """Return the attributes that link a span to the spans with these attributes."""
    pairs = [{"key_match": key, "value_match": value} for key, value in links.items()]
    return flatten_attributes({LightningSpanAttributes.LINK.value: pairs}, expand=True)


def _is_leaf(items: list[object]) -> bool:
    kinds = {type(item) for item in items}
    return len(kinds) == 1 and kinds <= {str, int, float, bool}


def _convert_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    tree = {key: _convert_lists(item) for key, item in cast(dict[str, Any], node).items()}
    if tree and all(key.isdigit() for key in tree):
        return [tree[key] for key in sorted(tree, key=int)]
    return tree
