"""Names of blocks under salts that begin after a shared prefix."""

from __future__ import annotations

import struct
from array import array
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.native import Shadow, root_hash
from kvasir.native.salt_places import SaltPlace, mark_place, prompt_names, salt_after, salt_place
from kvasir_workers.engines.vllm.events.block_marks import with_marks

BLOCK = 4
TOKENS = array("I", range(100, 140))


def names(salt: str, tokens: array[int] = TOKENS, adapter: str = "") -> list[int]:
    return prompt_names("m", salt, adapter, tokens, BLOCK).tolist()


@given(shared=st.integers(0, 60), more=st.integers(0, 60))
def test_two_tenants_share_exactly_the_whole_blocks_of_their_prefix(shared: int, more: int) -> None:
    red, blue, plain = names(salt_after(shared, "red")), names(salt_after(shared, "blue")), names("")
    blocks = min(shared // BLOCK, len(plain))
    assert red[:blocks] == blue[:blocks] == plain[:blocks]
    assert set(red[blocks:]).isdisjoint({*blue, *plain, *names("red")})
    again = names(salt_after(more, "red"))
    assert (again == red) == (min(more // BLOCK, len(plain)) == blocks)


def test_prompts_under_a_place_are_not_marked_themselves() -> None:
    before = TOKENS[:]
    names(salt_after(8, "red"))
    assert before == TOKENS


def test_adapters_stay_apart_under_a_place() -> None:
    salt = salt_after(8, "red")
    assert set(names(salt)).isdisjoint(names(salt, adapter="tuned"))


@given(shared=st.integers(0, 60), cuts=st.sets(st.integers(0, 10)))
def test_blocks_that_are_named_in_several_steps_have_the_names_of_one(shared: int, cuts: set[int]) -> None:
    place = SaltPlace(shared, "red")
    made = array("I")
    edges = sorted({0, *cuts, len(TOKENS) // BLOCK})
    for begin, end in pairwise(edges):
        part = TOKENS[begin * BLOCK : end * BLOCK]
        mark_place(part, begin, place, BLOCK)
        made += part
    whole = TOKENS[:]
    mark_place(whole, 0, place, BLOCK)
    assert made == whole


@pytest.mark.parametrize(
    "salt", ["", "red", "kvasir-shared:", "kvasir-shared:8:", "kvasir-shared:x:red", "8:red"]
)
def test_other_salts_have_no_place(salt: str) -> None:
    assert salt_place(salt) is None


def test_a_place_is_read_back() -> None:
    assert salt_place(salt_after(12, "a:b\n")) == SaltPlace(12, "a:b\n")


def message(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events)])


def stored(at: int, count: int, salts: dict[int, list[str]], parent: int | None = None) -> dict[str, Any]:
    """The event of blocks `at`, … of TOKENS; a block's key is its number."""
    return {
        "type": "BlockStored",
        "block_hashes": list(range(at + 1, at + 1 + count)),
        "parent_block_hash": at or None,
        "token_ids": TOKENS[at * BLOCK : (at + count) * BLOCK].tolist(),
        "block_size": BLOCK,
        "medium": "GPU",
        "extra_keys": [salts.get(number) for number in range(at, at + count)],
    }


def logged(payloads: list[bytes]) -> list[int]:
    """The names that a worker's record gives to the blocks of these events."""
    shadow = Shadow(1, lambda salt, adapter: root_hash("m", salt, adapter))
    for payload in payloads:
        shadow.ingest(0, with_marks(payload))
    log, at = shadow.take_log(), 0
    made: list[int] = []
    while at < len(log):
        (count,) = struct.unpack_from("<I", log, at + 4)
        made += struct.unpack_from(f"<{count}Q", log, at + 16)
        at += 16 + 8 * count
    return made


@pytest.mark.parametrize("cut", [1, 2, 3, 9])
def test_the_record_names_an_engines_blocks_as_the_router_does(cut: int) -> None:
    salt = salt_after(2 * BLOCK + 1, "red")
    place = salt_place(salt)
    assert place is not None
    salts = {2: [place.key]}
    assert logged([message(stored(0, cut, salts), stored(cut, 10 - cut, salts))]) == names(salt)


def test_the_record_of_an_adapter_keeps_its_name() -> None:
    salt = salt_after(BLOCK, "red")
    place = salt_place(salt)
    assert place is not None
    event = stored(0, 10, {0: ["ad"], 1: ["ad", place.key], 2: ["ad"]}) | {"lora_name": "ad"}
    assert logged([message(event)]) == names(salt, adapter="ad")


@pytest.mark.parametrize("payload", [b"", b"kvasir-salt:", msgspec.msgpack.encode([0, ["kvasir-salt:"]])])
def test_what_is_no_event_is_left_to_the_record(payload: bytes) -> None:
    assert with_marks(payload) == payload
