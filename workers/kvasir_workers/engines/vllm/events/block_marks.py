"""vLLM's KV events of blocks with a salt after a shared prefix, or with a part of an image, a video or audio,
as the record of the cache reads them.

The record knows salts of first blocks, and tokens. Where a salt is in the key of a later block, or an item of
media in the key of any, the tokens of that block are marked instead, as they are for the names that routers
compute (`kvasir.native.salt_places`, `kvasir.native.media_marks`).
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from kvasir.core.media.prompts import MEDIA_KEYS, has_media_key, media_key
from kvasir.native.media_marks import mark_item
from kvasir.native.salt_places import SALT_KEY, SaltPlace, mark_place

_MARKS = (SALT_KEY.encode(), *(key.encode() for key in MEDIA_KEYS))


def with_marks(payload: bytes) -> bytes:
    """Return a message of events with the tokens of salted blocks and of media marked. A malformed one is
    returned as it is, for the record to refuse."""
    if not any(mark in payload for mark in _MARKS):
        return payload
    try:
        message = msgspec.msgpack.decode(payload, type=list[Any])
        for event in message[1]:
            _mark(event)
    except (msgspec.DecodeError, TypeError, ValueError, LookupError, AttributeError, OverflowError):
        return payload
    return msgspec.msgpack.encode(message)


def _mark(event: dict[str, Any]) -> None:
    tokens: array[int] | None = None
    for at, keys in enumerate(event.get("extra_keys") or ()):
        salts = [key for key in keys or () if isinstance(key, str) and key.startswith(SALT_KEY)]
        media = [key for key in keys or () if isinstance(key, list) and has_media_key(str(key[0]))]
        if not salts and not media:
            continue
        size = event["block_size"]
        tokens = array("I", event["token_ids"]) if tokens is None else tokens
        for salt in salts[:1]:
            mark_place(tokens, 0, SaltPlace(at * size, salt.removeprefix(SALT_KEY)), size)
        for name, offset in media:
            # One token, since marks are the same in all blocks, and each has the item among its own keys.
            mark_item(tokens, at * size + max(0, offset), 1, media_key(name), size)
        event["extra_keys"][at] = [key for key in keys if key not in salts]
    if tokens is not None:
        event["token_ids"] = tokens.tolist()
