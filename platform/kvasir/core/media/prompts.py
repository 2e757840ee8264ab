"""Media in prompts: where each item is in the tokens, and what identifies it.

The router computes how many tokens an item becomes, and never decodes it; workers do.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class MediaKind(StrEnum):
    """What an item of media is."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"

    @property
    def plural(self) -> str:
        """Several of them, in messages."""
        return self.value if self is MediaKind.AUDIO else f"{self}s"

    @property
    def one(self) -> str:
        """One of them, in messages."""
        return {"image": "an image", "video": "a video"}.get(self, self.value)


_KEYS = {kind: f"kvasir-{kind}:" for kind in MediaKind}
MEDIA_KEYS = tuple(_KEYS.values())
"""How the keys begin by which an engine tells items from others."""
_KEY = re.compile("|".join(MEDIA_KEYS), re.ASCII)


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """An item at tokens `offset`, …, `offset + length - 1` of a prompt, which all are the model's
    placeholder for its kind. `data` is the file as the client sent it, and `digest` its SHA-256. `extent` is
    what is taken of it: frames of a video, samples of audio at the model's rate, 0 for an image."""

    offset: int
    length: int
    digest: bytes
    data: bytes = field(repr=False)
    kind: MediaKind = MediaKind.IMAGE
    extent: int = 0

    def key(self, salt: str) -> str:
        """Return what an engine adds to the hash of blocks that have a part of the item. Under another salt
        it is another key, so that tenants share neither KV nor encoded media; and so it is for another number
        of frames of the same video."""
        taken = b"" if self.kind is MediaKind.IMAGE else self.extent.to_bytes(8, "little")
        salted = hashlib.sha256(self.digest + taken + salt.encode())
        return _KEYS[self.kind] + salted.hexdigest()


def media_key(identifier: str) -> str:
    """Return the key in an engine's identifier of an item: it may begin with the name of an adapter."""
    found = _KEY.search(identifier)
    return identifier if found is None else identifier[found.start() :]


def has_media_key(identifier: str) -> bool:
    """Return whether an engine's identifier has the key of an item."""
    return _KEY.search(identifier) is not None


def kinds_of(media: Iterable[PromptMedia]) -> frozenset[MediaKind]:
    """Return the kinds of the items."""
    return frozenset(item.kind for item in media)


def expanded(
    tokens: array[int], placeholders: Mapping[MediaKind, int], media: Sequence[PromptMedia]
) -> tuple[array[int], tuple[PromptMedia, ...]]:
    """Return `tokens` with each placeholder repeated to the length of its item, and the items with their
    offsets, in the order of these. Items of one kind stay in order. Raises ValueError unless each kind of
    `media` has as many placeholders as items."""
    waiting = {
        kind: deque(item for item in media if item.kind is kind)
        for kind in MediaKind
        if kind in kinds_of(media)
    }
    for kind, items in waiting.items():
        if (found := tokens.count(placeholders[kind])) != len(items):
            raise ValueError(f"{found} placeholders for {len(items)} {kind.plural}")
    made, placed, at = array("I"), [], 0
    for _ in media:
        end, kind = min((tokens.index(placeholders[kind], at), kind) for kind in waiting if waiting[kind])
        item = waiting[kind].popleft()
        made.extend(tokens[at:end])
        placed.append(replace(item, offset=len(made)))
        made.extend(array("I", [placeholders[kind]]) * item.length)
        at = end + 1
    made.extend(tokens[at:])
    return made, tuple(placed)


def collapsed(
    tokens: array[int], placeholders: Mapping[MediaKind, int], media: Sequence[PromptMedia]
) -> array[int]:
    """Return `tokens` with one placeholder for each item: the inverse of `expanded`. Raises ValueError for an
    item that is not in order, whose tokens are not all the placeholder, or of a kind without one."""
    made, at = array("I"), 0
    for item in media:
        placeholder, end = placeholders.get(item.kind), item.offset + item.length
        if placeholder is None:
            raise ValueError(f"the model takes no {item.kind.plural}")
        run = tokens[item.offset : end]
        if item.offset < at or not item.length or run.count(placeholder) != item.length:
            raise ValueError(f"tokens {item.offset} to {end} are not those of {item.kind.one}")
        made.extend(tokens[at : item.offset])
        made.append(placeholder)
        at = end
    made.extend(tokens[at:])
    return made
