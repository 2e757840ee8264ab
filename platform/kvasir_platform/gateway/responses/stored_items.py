"""What is stored of a response's input, and pages of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvasir.core.errors import CapacityError, RequestError
from kvasir.ports.responses import StoredResponse
from kvasir_platform.gateway.openai.schema.limits import bad
from kvasir_platform.gateway.openai.schema.page_query import PageQuery
from kvasir_platform.gateway.responses.body import InputItem
from kvasir_platform.gateway.responses.decode import decode_items, item_type
from kvasir_platform.gateway.responses.response_object import CANCELLED, FAILED, response_error

_DEFAULT_PAGE, _MAX_PAGE = 20, 100


class _Output(msgspec.Struct):
    output: msgspec.Raw


_OUTPUT = msgspec.json.Decoder(_Output)


def conversation_of(stored: StoredResponse, param: str) -> list[InputItem]:
    """Return the items of a stored response: what it was made from, then its output. Raise RequestError, with
    the field `param` that names it, for one that has not ended well."""
    if stored.status != "ended":
        raise bad(f"Response {stored.id!r} is {stored.status}; continue one that has ended.", param)
    output = _OUTPUT.decode(stored.body).output
    return [*decode_items(stored.items), *decode_items(bytes(output))]


def items_json(key: str, earlier: Sequence[InputItem], items: Sequence[InputItem]) -> bytes:
    """Return the items of a response's input as JSON: with an id each, and content in parts. `key` makes ids
    of `items` unique."""
    shown = [_shown(item, "") for item in earlier]
    shown += [_shown(item, f"{key}i{i:02x}") for i, item in enumerate(items)]
    return msgspec.json.encode(shown)


def shown_response(stored: StoredResponse) -> bytes:
    """Return a stored response as JSON."""
    if stored.status not in ("cancelled", "lost"):
        return stored.body
    response: dict[str, Any] = msgspec.json.decode(stored.body)
    response["status"] = CANCELLED if stored.status == "cancelled" else FAILED
    if stored.status == "lost":
        response["error"] = response_error(
            CapacityError("The process that ran the response has ended.", code="router_lost")
        )
    return msgspec.json.encode(response)


def items_page(items: bytes, query: bytes) -> bytes:
    """Return one page of stored items as JSON. `query` has `order` (asc, or desc by default), `limit` and
    `after`, the id of the last item of the page before. Raise RequestError."""
    asked = PageQuery(query, default=_DEFAULT_PAGE, most=_MAX_PAGE)
    found: list[dict[str, Any]] = msgspec.json.decode(items)
    if asked.newest_first:
        found.reverse()
    begin = 0
    if asked.after:
        begin = next((i + 1 for i, item in enumerate(found) if item.get("id") == asked.after), 0)
        if not begin:
            raise RequestError("after names no item of this response.", code="invalid_value", param="after")
    page = found[begin : begin + asked.limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": begin + len(page) < len(found),
        }
    )


def _shown(item: InputItem, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(item)
    kind = shown["type"] = item_type(item)
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}.get(kind, "fco")
    if "id" not in shown:
        shown["id"] = f"{prefix}_{name}"
    if kind == "message" and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        shown["content"] = [{"type": part, "text": item.content}]
        if item.role == "assistant":
            shown["content"][0]["annotations"] = []
    if kind != "reasoning":
        shown.setdefault("status", "completed")
    else:
        shown.setdefault("summary", [])
    return shown
