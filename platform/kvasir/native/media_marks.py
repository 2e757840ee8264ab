"""The names of blocks that have a part of an image, a video or audio.

All items of a kind are the same placeholder tokens in a prompt. For names, the tokens of each block with a
part of an item are combined with a hash of the item's key, from the item's first token in the block on. An
engine's events have the key and the item's place, but not its length, so the marks do not depend on the
length.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from kvasir.core.media.prompts import PromptMedia


def mark_media(tokens: array[int], media: Iterable[PromptMedia], salt: str, block_size: int) -> None:
    """Mark the blocks of a prompt with parts of `media`."""
    for item in media:
        mark_item(tokens, item.offset, item.length, item.key(salt), block_size)


def mark_item(tokens: array[int], offset: int, length: int, key: str, block_size: int) -> None:
    """Mark the blocks of `tokens`, which begin with a block, that have a part of the item at tokens
    `offset`, …, `offset + length - 1`. A negative offset is that of an item which begins before `tokens`."""
    pad = array("I", hashlib.blake2b(key.encode(), digest_size=16).digest())
    at, end = max(offset, 0), min(offset + length, len(tokens))
    while at < end:
        boundary = min((at // block_size + 1) * block_size, len(tokens))
        for place, word in zip(range(at, boundary), pad, strict=False):
            tokens[place] ^= word
        at = boundary
