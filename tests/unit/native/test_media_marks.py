"""Names of blocks that have a part of an image."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.media.prompts import PromptMedia
from kvasir.native import Shadow, root_hash
from kvasir.native.salt_places import prompt_names, salt_after, salt_place
from kvasir_workers.engines.vllm.events.block_marks import with_marks

BLOCK = 8
TOKENS = array("I", range(100, 180))


def image(offset: int, length: int, name: bytes = b"cat") -> PromptMedia:
    return PromptMedia(offset, length, hashlib.sha256(name).digest(), name)


def names(*images: PromptMedia, salt: str = "") -> list[int]:
    return prompt_names("m", salt, "", TOKENS, BLOCK, media=images).tolist()


@given(offset=st.integers(0, 79), length=st.integers(1, 80))
def test_names_differ_from_the_block_on_in_which_the_image_begins(offset: int, length: int) -> None:
    length = min(length, len(TOKENS) - offset)
    cat, dog, plain = names(image(offset, length)), names(image(offset, length, b"dog")), names()
    first = offset // BLOCK
    assert cat[:first] == dog[:first] == plain[:first]
    assert set(cat[first:]).isdisjoint({*dog, *plain})


def test_prompts_with_images_are_not_marked_themselves() -> None:
    before = TOKENS[:]
    names(image(3, 20))
    assert before == TOKENS


def test_salts_keep_equal_images_apart_and_leave_a_shared_prefix() -> None:
    red, blue = (names(image(30, 20), salt=salt_after(16, salt)) for salt in ("red", "blue"))
    assert red[:2] == blue[:2]
    assert set(red[2:]).isdisjoint(blue)


def extra_keys(images: list[PromptMedia], salt: str, blocks: int) -> list[list[Any] | None]:
    """The keys of vLLM's events: the id of each image in a block and its place, then the salt."""
    place = salt_place(salt)
    made: list[list[Any] | None] = []
    for begin in range(0, blocks * BLOCK, BLOCK):
        keys: list[Any] = [
            [each.key(salt), each.offset - begin]
            for each in images
            if each.offset < begin + BLOCK and begin < each.offset + each.length
        ]
        if place is not None and begin <= place.tokens < begin + BLOCK:
            keys.append(place.key)
        elif place is None and salt and not begin:
            keys.append(salt)
        made.append(keys or None)
    return made


def logged(images: list[PromptMedia], salt: str, cut: int) -> list[int]:
    """The names that a worker's record gives to the blocks of a prompt, stored in two events."""
    blocks = len(TOKENS) // BLOCK
    keys = extra_keys(images, salt, blocks)
    events = [
        {
            "type": "BlockStored",
            "block_hashes": list(range(begin + 1, end + 1)),
            "parent_block_hash": begin or None,
            "token_ids": TOKENS[begin * BLOCK : end * BLOCK].tolist(),
            "block_size": BLOCK,
            "medium": "GPU",
            "extra_keys": keys[begin:end],
        }
        for begin, end in ((0, cut), (cut, blocks))
        if end > begin
    ]
    shadow = Shadow(1, lambda salt, adapter: root_hash("m", salt, adapter))
    shadow.ingest(0, with_marks(msgspec.msgpack.encode([0.0, events])))
    log, at = shadow.take_log(), 0
    made: list[int] = []
    while at < len(log):
        (count,) = struct.unpack_from("<I", log, at + 4)
        made += struct.unpack_from(f"<{count}Q", log, at + 16)
        at += 16 + 8 * count
    return made


@given(
    runs=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), max_size=4),
    salt=st.sampled_from(["", "red", salt_after(20, "red")]),
    cut=st.integers(0, 10),
)
def test_the_record_names_an_engines_blocks_as_the_router_does(
    runs: list[tuple[int, int]], salt: str, cut: int
) -> None:
    images, at = [], 0
    for number, (gap, length) in enumerate(runs):
        if at + gap + length <= len(TOKENS):
            images.append(image(at + gap, length, b"%d" % (number % 2)))
            at += gap + length
    assert logged(images, salt, cut) == names(*images, salt=salt)
