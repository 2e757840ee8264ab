"""What the OpenAPI document says of one path and method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_EVENTS = (
    "Each event is `data: ` and one JSON object; the last is `data: [DONE]`. "
    "After an error in mid-stream the last is the error's object, and there is no [DONE]."
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One path and method. `chunks` are the bodies of stream events, and `events` describes the stream; `tag`
    is its group, and `query` has the name, schema and description of each parameter of the query.
    `form` has the fields of a body that is a
    form, with their descriptions. `anthropic`: its errors have the form of Anthropic's API;
    `anthropic_answer` is a second answer, where both APIs have the path."""

    path: str
    method: str
    name: str
    summary: str
    answer: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    chunks: tuple[type[msgspec.Struct], ...] = ()
    status: int = 200
    key: bool = True
    tag: str = "API"
    body_required: bool = True
    events: str = _EVENTS
    form: tuple[tuple[str, str], ...] = ()
    query: tuple[tuple[str, dict[str, Any], str], ...] = ()
    anthropic: bool = False
    anthropic_answer: type[msgspec.Struct] | None = None
