"""Salts that begin after a prefix which tenants share, and the names of blocks under them.

A salt usually names all blocks of a prompt. With a shared prefix of N tokens it names those from the first
block that has another token: blocks before it have the names that they have without a salt, so that all
tenants of the prefix share them, and each later name depends on the salt. A block's name is an XXH64 of its
tokens and its parent's name; the salt's place is marked by the tokens of that block, which are combined with
a hash of the salt before they are named. Engines keep KV apart by their own hashes, not by these names.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kvasir.core.media.prompts import PromptMedia
from kvasir.native import chain_hashes, root_hash
from kvasir.native.media_marks import mark_media

SALT_KEY = "kvasir-salt:"
"""Beginning of the key that an engine adds to the hash of the block at a salt's place."""
_MARK = "kvasir-shared:"
_PLACED = re.compile(re.escape(_MARK) + r"(\d{1,9}):(.{1,512})", re.DOTALL)


class SaltPlace(NamedTuple):
    """A salt, and the number of tokens before it that are shared."""

    tokens: int
    salt: str

    @property
    def key(self) -> str:
        """What an engine adds to the hash of the block at the place."""
        return SALT_KEY + self.salt


def salt_after(tokens: int, salt: str) -> str:
    """Return what a request carries as its salt, if its first `tokens` tokens are shared."""
    return f"{_MARK}{tokens}:{salt}"


@lru_cache(1024)
def salt_place(salt: str) -> SaltPlace | None:
    """Return the place of a salt that `salt_after` has made, None for one that names all blocks."""
    found = _PLACED.fullmatch(salt)
    return None if found is None else SaltPlace(int(found[1]), found[2])


def prompt_root(model: str, salt: str, adapter: str) -> int:
    """Return the root of the names of a prompt's blocks."""
    return root_hash(model, "" if salt_place(salt) is not None else salt, adapter)


def prompt_names(
    model: str,
    salt: str,
    adapter: str,
    tokens: array[int],
    block_size: int,
    *,
    media: Sequence[PromptMedia] = (),
) -> array[int]:
    """Return the names of a prompt's whole blocks, which no other model, salt, adapter or media shares,
    except those of a shared prefix."""
    place = salt_place(salt)
    if place is not None or media:
        tokens = tokens[:]
    if place is not None:
        mark_place(tokens, 0, place, block_size)
    if media:
        mark_media(tokens, media, salt, block_size)
    return chain_hashes(tokens, block_size, prompt_root(model, salt, adapter))


def mark_place(tokens: array[int], first_block: int, place: SaltPlace, block_size: int) -> None:
    """Combine the salt with the tokens of its block, if it is among these whole blocks, which begin with
    block `first_block` of the prompt."""
    begin = (place.tokens // block_size - first_block) * block_size
    if 0 <= begin <= len(tokens) - block_size:
        for at, word in enumerate(_pad(place.key)[:block_size], begin):
            tokens[at] ^= word


def _pad(key: str) -> array[int]:
    """Return four 32-bit words that only the salt's holder can know."""
    return array("I", hashlib.blake2b(key.encode(), digest_size=16).digest())
