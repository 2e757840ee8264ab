"""References to items of stored responses: an item's id says which response made it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from kvasir_platform.gateway.responses.body import InputItem, ResponsesBody
from kvasir_platform.gateway.responses.conversation import input_items
from kvasir_platform.gateway.responses.decode import item_type

REFERENCE = "item_reference"
_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})i?[0-9a-f]{2,4}")


def response_of(item_id: str) -> str | None:
    """Return the id of the response that made an item, or got it as input; None for an id of another form."""
    found = _ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


def next_reference(asked: ResponsesBody, known: Mapping[str, InputItem]) -> tuple[int, str] | None:
    """Return the place and the id of the last reference whose item is not `known`, None for none. The newest
    response has the items of those before it, too."""
    items = input_items(asked)
    for i in range(len(items) - 1, -1, -1):
        if item_type(items[i]) == REFERENCE and (items[i].id or "") not in known:
            return i, items[i].id or ""
    return None


def resolved(asked: ResponsesBody, known: Mapping[str, InputItem]) -> ResponsesBody:
    """Return the body with items in place of references, all of which are `known`."""
    if not known:
        return asked
    items = [known[item.id or ""] if item_type(item) == REFERENCE else item for item in input_items(asked)]
    return msgspec.structs.replace(asked, input=items)
