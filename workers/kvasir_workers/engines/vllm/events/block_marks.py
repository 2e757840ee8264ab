"""vLLM's KV events of blocks with a salt after a shared prefix, as the record of the cache reads them.

The record knows salts of first blocks. Where one is in the key of a later block, the tokens of that block are
marked instead, as they are for the names that routers compute (`kvasir.native.salt_places`).
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from kvasir.native.salt_places import SALT_KEY, SaltPlace, mark_place

_MARK = SALT_KEY.encode()


def with_marked_places(payload: bytes) -> bytes:
    """Return a message of events with the tokens of salted blocks marked. A malformed one is returned as it
    is, for the record to refuse."""
    if _MARK not in payload:
        return payload
    try:
        message = msgspec.msgpack.decode(payload, type=list[Any])
        for event in message[1]:
            _mark(event)
    except (msgspec.DecodeError, TypeError, ValueError, LookupError, AttributeError, OverflowError):
        return payload
    return msgspec.msgpack.encode(message)


def _mark(event: dict[str, Any]) -> None:
    for at, keys in enumerate(event.get("extra_keys") or ()):
        salts = [key for key in keys or () if isinstance(key, str) and key.startswith(SALT_KEY)]
        if salts:
            size = event["block_size"]
            tokens = array("I", event["token_ids"])
            mark_place(tokens, 0, SaltPlace(at * size, salts[0].removeprefix(SALT_KEY)), size)
            event["token_ids"] = tokens.tolist()
            event["extra_keys"][at] = [key for key in keys if key not in salts]
