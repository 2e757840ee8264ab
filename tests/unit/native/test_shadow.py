"""A worker's shadow: native and twin apply events equally, and refuse the same malformed input."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from kvasir.core.kv import KvEventKind, Medium
from kvasir.native import PrefixTree, Shadow, _twin, chain_hashes, root_hash

BLOCK = 4
encode = msgspec.msgpack.encode
BOTH = pytest.mark.parametrize("shadow_of", [Shadow, _twin.Shadow], ids=["native", "twin"])


def root_of(salt: str, adapter: str) -> int:
    return root_hash("m", salt, adapter)


def block_stored(
    keys: list[bytes | int], parent: bytes | int | None, tokens: list[int], **more: Any
) -> dict[str, Any]:
    """As vLLM encodes it."""
    return {
        "type": "BlockStored",
        "block_hashes": keys,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def change(
    kind: KvEventKind, medium: int, names: Sequence[int] = (), parent: int = 0, rank: int = 0
) -> bytes:
    """One record of a log."""
    above = struct.pack("<Q", parent) if kind == KvEventKind.STORED else b""
    return struct.pack("<BBHI", kind, medium, rank, len(names)) + above + array("Q", names).tobytes()


def tier_changed(*changes: bytes) -> dict[str, Any]:
    return {"type": "KvasirTierChanged", "log": b"".join(changes)}


def message(*events: dict[str, Any]) -> bytes:
    return encode([1.5, list(events), 0])


def holdings(shadow: Any, ranks: int = 1) -> PrefixTree:
    """What a router would hold after a snapshot."""
    tree = PrefixTree(1_000_000, 0)
    groups = [tree.add_group() for _ in range(ranks)]
    for rank in range(ranks):
        cursor = 0
        while cursor >= 0:
            log, cursor = shadow.export(rank, cursor, 5)
            tree.apply(groups, log)
    return tree


def depth(tree: PrefixTree, names: array[int], group: int = 0, medium: int = Medium.DEVICE) -> int:
    out = array("I", bytes(256))
    tree.match(names, out)
    return out[4 * group + medium]


def hash_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


@BOTH
def test_a_stored_run_has_the_names_that_the_router_computes(shadow_of: Any) -> None:
    shadow, tokens = shadow_of(1, root_of), list(range(3 * BLOCK))
    assert shadow.ingest(0, message(block_stored([hash_of(n) for n in (1, 2, 3)], None, tokens))) == 1
    names = chain_hashes(array("I", tokens), BLOCK, root_hash("m"))
    assert depth(holdings(shadow), names) == 3


@BOTH
def test_salt_and_adapter_start_other_chains(shadow_of: Any) -> None:
    shadow, tokens = shadow_of(1, root_of), list(range(BLOCK))
    cases: list[tuple[dict[str, Any], int]] = [
        ({"extra_keys": [["s"]]}, root_hash("m", "s")),
        ({"extra_keys": [["a"]], "lora_name": "a"}, root_hash("m", "", "a")),
        ({"extra_keys": [["a", ["mm", 3], "s"]], "lora_name": "a"}, root_hash("m", "s", "a")),
    ]
    for number, (more, root) in enumerate(cases, start=1):
        shadow.ingest(0, message(block_stored([hash_of(number)], None, tokens, **more)))
        assert depth(holdings(shadow), chain_hashes(array("I", tokens), BLOCK, root)) == 1
    assert shadow.held(0, Medium.DEVICE) == 3


@BOTH
def test_a_block_is_held_until_as_many_copies_were_removed(shadow_of: Any) -> None:
    shadow, tokens = shadow_of(1, root_of), list(range(BLOCK))
    for _ in range(2):
        shadow.ingest(0, message(block_stored([7], None, tokens)))
    gone = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
    shadow.ingest(0, message(gone))
    assert shadow.held(0, Medium.DEVICE) == 1
    shadow.ingest(0, message(gone))
    assert shadow.held(0, Medium.DEVICE) == 0


@BOTH
def test_a_block_whose_parent_is_unknown_is_counted_and_not_recorded(shadow_of: Any) -> None:
    shadow = shadow_of(1, root_of)
    shadow.ingest(0, message(block_stored([hash_of(2)], hash_of(1), list(range(BLOCK)))))
    assert (shadow.held(0, Medium.DEVICE), shadow.unnamed, shadow.take_log()) == (0, 1, b"")


@BOTH
def test_other_cache_groups_are_passed_over(shadow_of: Any) -> None:
    shadow = shadow_of(1, root_of)
    shadow.ingest(0, message(block_stored([1], None, list(range(BLOCK)), group_idx=1)))
    assert (shadow.held(0, Medium.DEVICE), shadow.unnamed) == (0, 0)


@BOTH
def test_the_engines_cache_is_cleared_on_the_device_of_one_rank_and_tiers_stay(shadow_of: Any) -> None:
    shadow, tokens = shadow_of(2, root_of), list(range(BLOCK))
    for rank in (0, 1):
        for medium in ("GPU", "CPU", "STORAGE"):
            shadow.ingest(rank, message(block_stored([1], None, tokens, medium=medium)))
    shadow.take_log()
    shadow.ingest(0, message({"type": "AllBlocksCleared"}))
    assert [shadow.held(0, medium) for medium in Medium] == [0, 1, 1, 0]
    assert [shadow.held(1, medium) for medium in Medium] == [1, 1, 1, 0]
    assert shadow.take_log() == change(KvEventKind.CLEARED, Medium.DEVICE)
    gone = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}
    shadow.ingest(0, message(gone))
    assert shadow.held(0, Medium.CPU) == 0, "the key of a tier's block was forgotten"


@BOTH
def test_a_tiers_blocks_are_told_to_routers_by_the_names_they_came_with(shadow_of: Any) -> None:
    shadow, names = shadow_of(2, root_of), chain_hashes(array("I", range(5 * BLOCK)), BLOCK, root_hash("m"))
    stored = change(KvEventKind.STORED, Medium.REMOTE, names[:4], root_hash("m"), rank=9)
    assert shadow.ingest(1, message(tier_changed(stored))) == 1
    assert shadow.take_log() == change(KvEventKind.STORED, Medium.REMOTE, names[:4], root_hash("m"), rank=1)
    shadow.ingest(1, message(tier_changed(change(KvEventKind.REMOVED, Medium.REMOTE, [names[3], 5]))))
    assert [shadow.held(1, medium) for medium in Medium] == [0, 0, 0, 3]
    assert depth(holdings(shadow, 2), names, group=1, medium=Medium.REMOTE) == 3
    assert depth(holdings(shadow, 2), names, group=1, medium=Medium.DISK) == 0
    assert shadow.unnamed == 0


@BOTH
def test_a_tier_that_says_again_what_is_known_changes_nothing(shadow_of: Any) -> None:
    shadow, stored = shadow_of(1, root_of), change(KvEventKind.STORED, Medium.DISK, [1, 2, 3])
    shadow.ingest(0, message(tier_changed(stored)))
    shadow.take_log()
    shadow.ingest(0, message(tier_changed(stored, change(KvEventKind.REMOVED, Medium.CPU, [1]))))
    shadow.ingest(0, message(tier_changed(change(KvEventKind.CLEARED, Medium.CPU)), tier_changed()))
    assert shadow.take_log() == b""


@BOTH
def test_a_tier_that_begins_anew_is_cleared_alone(shadow_of: Any) -> None:
    shadow, tokens = shadow_of(1, root_of), list(range(BLOCK))
    shadow.ingest(0, message(block_stored([1], None, tokens)))
    for medium in (Medium.CPU, Medium.DISK, Medium.REMOTE):
        shadow.ingest(0, message(tier_changed(change(KvEventKind.STORED, medium, [7, 8]))))
    again = change(KvEventKind.CLEARED, Medium.DISK) + change(KvEventKind.STORED, Medium.DISK, [9])
    shadow.ingest(0, message(tier_changed(again)))
    assert [shadow.held(0, medium) for medium in Medium] == [1, 2, 1, 2]


@BOTH
def test_a_tiers_changes_that_are_malformed_record_nothing(shadow_of: Any) -> None:
    shadow, good = shadow_of(1, root_of), change(KvEventKind.STORED, Medium.CPU, [1, 2])
    logs: list[Any] = [
        good[:-1],
        good + b"\x01",
        good + change(KvEventKind.STORED, Medium.DEVICE, [3]),
        good + change(KvEventKind.CLEARED, Medium.DEVICE),
        good + change(KvEventKind.STORED, 4, [3]),
        good + struct.pack("<BBHI", 9, Medium.CPU, 0, 0),
        good + struct.pack("<BBHI", KvEventKind.REMOVED, Medium.CPU, 0, 0xFFFFFFFF),
        good + struct.pack("<BBHIQ", KvEventKind.CLEARED, Medium.CPU, 0, 1, 1),
        "text",
        None,
    ]
    for log in logs:
        with pytest.raises(ValueError, match="event"):
            shadow.ingest(0, message(tier_changed(good), {"type": "KvasirTierChanged", "log": log}))
    with pytest.raises(ValueError, match="event"):
        shadow.ingest(0, message({"type": "KvasirTierChanged"}))
    assert ([shadow.held(0, medium) for medium in Medium], shadow.take_log()) == ([0] * 4, b"")


@BOTH
def test_a_malformed_message_is_refused_and_records_nothing(shadow_of: Any) -> None:
    shadow, good = shadow_of(1, root_of), block_stored([1], None, list(range(BLOCK)))
    wrong: list[Any] = [
        [1.0, [good, {"type": "Unheard"}], 0],
        [1.0, [good, {"block_hashes": [1]}], 0],
        [1.0, [good, {**good, "token_ids": ["x"]}], 0],
        [1.0],
        {"a": 1},
        [1.0, [good, 5], 0],
    ]
    for each in wrong:
        with pytest.raises(ValueError, match="event"):
            shadow.ingest(0, encode(each))
    payload = message(good)
    for end in range(len(payload)):
        with pytest.raises(ValueError, match="event"):
            shadow.ingest(0, payload[:end])
    assert (shadow.held(0, Medium.DEVICE), shadow.take_log()) == (0, b"")


@BOTH
def test_token_ids_are_read_in_each_length_and_next_to_each_other(shadow_of: Any) -> None:
    ids = [0, 0x7F, 0x80, 0xFF, 0x100, 0xFFFF, 0x10000, 2**31 - 1]
    for seed in range(200):
        rng = Random(seed)
        shadow, tokens = shadow_of(1, root_of), rng.choices(ids, k=3 * BLOCK)
        event = block_stored([hash_of(n) for n in (1, 2, 3)], None, tokens)
        # Of the last ids of a message, fewer bytes follow than an id can have.
        event["token_ids"] = event.pop("token_ids")
        payload = encode([1.0, [event]])
        assert shadow.ingest(0, payload) == 1
        names = chain_hashes(array("I", tokens), BLOCK, root_hash("m"))
        assert depth(holdings(shadow), names) == 3
        with pytest.raises(ValueError, match="event"):
            shadow.ingest(0, payload[:-1])


@BOTH
def test_token_ids_that_are_no_numbers_of_32_bits_are_refused(shadow_of: Any) -> None:
    good = block_stored([1], None, list(range(BLOCK)))
    for wrong in (2**32, -1, None, 1.5, True):
        for at in (0, BLOCK - 1):
            tokens: list[Any] = list(range(BLOCK))
            tokens[at] = wrong
            event = {**good, "token_ids": tokens}
            event["token_ids"] = event.pop("token_ids")
            for payload in (message(event), encode([1.0, [event]])):
                shadow = shadow_of(1, root_of)
                with pytest.raises(ValueError, match="event"):
                    shadow.ingest(0, payload)
                assert shadow.held(0, Medium.DEVICE) == 0


def test_garbage_never_does_more_than_raise() -> None:
    shadow, rng = Shadow(1, root_of), Random(4)
    stored = block_stored([hash_of(1)], None, list(range(BLOCK)), extra_keys=[["s"]])
    payload = message(stored, tier_changed(change(KvEventKind.STORED, Medium.CPU, [1, 2])))
    for _ in range(20_000):
        mutated = bytearray(payload)
        for _ in range(rng.randrange(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        try:
            shadow.ingest(0, bytes(mutated))
        except ValueError:
            continue
    deep = b"\x93\x01" + b"\x91" * 100_000
    with pytest.raises(ValueError, match="event"):
        shadow.ingest(0, deep)


def _tier_changes(rng: Random, names: array[int]) -> dict[str, Any]:
    """A few changes of two tiers; ranks are anything, since tiers know none."""
    changes = []
    for _ in range(rng.randrange(4)):
        medium, rank = rng.choice([Medium.CPU, Medium.REMOTE]), rng.randrange(3)
        what = rng.random()
        if what < 0.65:
            begin = rng.randrange(len(names))
            parent = names[begin - 1] if begin else root_of("", "")
            changes.append(change(KvEventKind.STORED, medium, names[begin : begin + 9], parent, rank))
        elif what < 0.95:
            gone = rng.sample(list(names), rng.randrange(8))
            changes.append(change(KvEventKind.REMOVED, medium, gone, rank=rank))
        else:
            changes.append(change(KvEventKind.CLEARED, medium, rank=rank))
    return tier_changed(*changes)


def _engine_events(rng: Random, random_chain: Any, number: int) -> tuple[int, bytes]:
    """A few events of an engine that holds runs of few chains, with copies, on two ranks and three media,
    and of tiers of which one shares a medium with it."""
    events: list[dict[str, Any]] = []
    for _ in range(rng.randrange(1, 5)):
        # The engine's own keys: names of another chain over the same choices.
        keys = list(random_chain(rng))
        tokens = [key & 0xFFFF for key in keys for _ in range(BLOCK)]
        begin = rng.randrange(len(keys))
        end = rng.randrange(begin, min(len(keys), begin + 9) + 1)
        medium = rng.choice(["GPU", "GPU", "CPU", None])
        what = rng.random()
        if what < 0.45:
            begin = 0 if what < 0.22 else begin
            parent = keys[begin - 1] if begin else None
            events.append(
                block_stored(keys[begin:end], parent, tokens[begin * BLOCK : end * BLOCK], medium=medium)
            )
        elif what < 0.72:
            gone = rng.sample(keys, rng.randrange(8))
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": medium})
        elif what < 0.97:
            names = chain_hashes(array("I", tokens), BLOCK, root_of("", ""))
            events.append(_tier_changes(rng, names))
        else:
            events.append({"type": "AllBlocksCleared"})
    return number % 2, message(*events)


@pytest.mark.parametrize("seed", range(40))
def test_shadow_twin_and_the_router_that_follows_agree(seed: int, random_chain: Any) -> None:
    rng = Random(seed)
    mine, twin = Shadow(2, root_of), _twin.Shadow(2, root_of)
    router = PrefixTree(1_000_000, 0)
    groups = [router.add_group(), router.add_group()]
    for number in range(80):
        rank, payload = _engine_events(rng, random_chain, number)
        assert mine.ingest(rank, payload) == twin.ingest(rank, payload)
        assert mine.unnamed == twin.unnamed
        router.apply(groups, mine.take_log())
        for each in (0, 1):
            for medium in Medium:
                held = twin.held(each, medium)
                assert mine.held(each, medium) == held
                assert router.held(groups[each], medium) == held
    for snapshot in (holdings(mine, 2), holdings(twin, 2)):
        for each in (0, 1):
            assert [snapshot.held(each, m) for m in Medium] == [twin.held(each, m) for m in Medium]


def test_a_salt_that_cannot_be_read_records_nothing() -> None:
    shadow = Shadow(1, root_of)
    bad = message(block_stored([2], None, list(range(BLOCK)), extra_keys=[["SALT"]])).replace(
        b"SALT", b"\xff\xfe\xff\xfe"
    )
    good = message(block_stored([1], None, list(range(BLOCK))))
    # Two events in one message: the second one's salt is no text.
    both = good[:10] + b"\x92" + good[11:-1] + bad[11:]
    with pytest.raises(ValueError, match="utf-8"):
        shadow.ingest(0, both)
    assert (shadow.held(0, Medium.DEVICE), shadow.take_log()) == (0, b"")


def test_asking_for_a_root_may_lead_back_into_the_shadow() -> None:
    inner = message(block_stored([hash_of(9)], None, list(range(BLOCK)), extra_keys=[["inner"]]))

    def asks(salt: str, adapter: str) -> int:
        if salt == "outer":
            shadow.ingest(0, inner)
        return root_of(salt, adapter)

    shadow = Shadow(1, asks)
    many: list[bytes | int] = [hash_of(n) for n in range(1, 200)]
    shadow.ingest(0, message(block_stored(many, None, list(range(199 * BLOCK)), extra_keys=[["outer"]])))
    assert shadow.held(0, Medium.DEVICE) == 200
