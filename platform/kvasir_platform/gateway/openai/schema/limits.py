"""Limits on the contents of a body.

A body is bounded in bytes before it is read; what costs more than its bytes (a grammar to compile, a choice
to run, a level of nesting) is bounded here, so that the cost of a request is bounded too.
"""

from __future__ import annotations

from itertools import compress
from typing import Annotated, Any

from msgspec import Meta

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.catalog.slo_classes import MAX_HINT

MAX_CHOICES = 128
MAX_PROMPTS = 64
MAX_INPUTS = 2048
MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_STOP = 16
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 17
"""Alternatives of all prompt positions together, including the prompt's own tokens."""
MAX_TOOLS = 128
MAX_TOOL_BYTES = 64 << 10
"""Maximum size of one tool, as JSON."""
MAX_CALLS = 128
MAX_DOCUMENTS = 256
MAX_BAD_WORDS = 64
"""vLLM's limit is 128, and a word may need two entries: with and without a leading space."""
MAX_CHOICES_BAD_WORDS = 1024
"""Bad words of all choices together: an engine compares each with each choice's output, in every step."""
MAX_TOKEN_IDS = 1024
MAX_SCHEMA_BYTES = 64 << 10
"""Maximum size of a JSON schema, a grammar or a structural tag."""
MAX_REGEX = 4096
MAX_OPTIONS = 1024
"""Maximum number of strings of a structured choice."""
MAX_TEMPLATE = 128 << 10
MAX_DEPTH = 64
"""Nesting of JSON in a schema, a tool's parameters or template variables; vLLM's own limit."""
MAX_ITEMS = 1 << 14
"""Values in a schema, a tool's parameters, a call's arguments or template variables."""
MAX_TAG_DEPTH = MAX_DEPTH + 16
"""A structural tag contains schemas."""
MAX_KWARGS = 32
MAX_METADATA = 16
_REFERENCES = frozenset(("$ref", "$dynamicRef", "$recursiveRef"))
_CONTAINERS = frozenset((dict, list)).__contains__
_INT64 = 1 << 63
_INT32 = 1 << 31

Count = Annotated[int, Meta(ge=1, le=_INT32 - 1)]
Whole = Annotated[int, Meta(ge=0, le=_INT32 - 1)]
Long = Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)]
Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKEN_IDS)]
Hint = Annotated[str, Meta(max_length=MAX_HINT)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
FunctionName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/\-]+$")]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MAX_METADATA),
]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
JsonObject = dict[str, Any]
Variables = Annotated[JsonObject, Meta(max_length=MAX_KWARGS)]

#: Any JSON value: declared only to be refused by name.
NotServed = Any


def check_depth(value: object, param: str, levels: int = MAX_DEPTH) -> None:
    """Raise RequestError if `value` nests objects and arrays deeper than `levels`, or has too many values."""
    level: list[dict[Any, Any] | list[Any]] = [value] if isinstance(value, dict | list) else []
    items = 0
    for _ in range(levels):
        items += sum(map(len, level))
        if items > MAX_ITEMS:
            raise bad(f"{param} has more than {MAX_ITEMS} values.", param)
        level = [child for node in level for child in containers_in(node)]
        if not level:
            return
    raise bad(f"{param} nests deeper than {levels} levels.", param)


def containers_in(node: dict[Any, Any] | list[Any]) -> list[dict[Any, Any] | list[Any]]:
    """Return the objects and arrays directly inside of one."""
    inside = node.values() if type(node) is dict else node
    # A third of the time of a comprehension, and a body has up to half a million values.
    return list(compress(inside, map(_CONTAINERS, map(type, inside))))


def check_references(schema: object, param: str) -> None:
    """Raise RequestError if a JSON schema refers to anything outside itself: external references are not
    fetched and would not be enforced. `schema` must have passed `check_depth`."""
    nodes: list[Any] = [schema] if isinstance(schema, dict | list) else []
    while nodes:
        node = nodes.pop()
        for key in _REFERENCES.intersection(node) if isinstance(node, dict) else ():
            target = node[key]
            if isinstance(target, str) and not target.startswith("#"):
                raise bad(
                    f"{param} refers to {target[:128]!r} by {key}; external references are not fetched. "
                    "Put it under $defs and refer to it by #/$defs/NAME.",
                    param,
                )
        nodes += containers_in(node)


def check_size(text: str | bytes, limit: int, param: str) -> None:
    """Raise RequestError if `text` has more than `limit` bytes in UTF-8."""
    size = len(text)
    if size <= limit and isinstance(text, str):
        size = len(text.encode())
    if size > limit:
        raise bad(f"{param} has {size} bytes; {limit} are allowed.", param)


def bad(message: str, param: str) -> RequestError:
    """Return the error for an invalid value."""
    return RequestError(message, code="invalid_value", param=param)


def missing(param: str) -> RequestError:
    """Return the error for a missing field."""
    return RequestError(f"Missing required parameter: {param}.", code="missing_parameter", param=param)


def unsupported(param: str, why: str = "") -> RequestError:
    """Return the error for an unsupported field of the API; `why` is a sentence about it."""
    message = why or f"{param} is not supported by this server."
    return RequestError(message, code="unsupported_parameter", param=param)
