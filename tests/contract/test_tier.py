"""Contract of tiers: files, and a real Redis. Host memory has no such adapter: the arena is the CPU tier,
tested in tests/unit/tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from tests.kit.engines.tier_blocks import block
from tests.kit.lab.redis_server import RedisServer

from kvasir.config.spec.tiers import DiskTierSpec, RedisTierSpec
from kvasir.core.identity import KvLayout
from kvasir.core.kv import Medium
from kvasir.ports.tier import KvTier, TierBlock, TierChange, TierRead, TierWrite
from kvasir_workers.tiers.blob import fingerprint
from kvasir_workers.tiers.blobs.disk import DiskTier
from kvasir_workers.tiers.blobs.redis_tier import RedisTier
from kvasir_workers.tiers.setup import shared_tier

SIZE = 4096
ROOM = 300
"""Blocks that the disk tier has room for."""
FOOTPRINT = 8192
"""What a block of SIZE bytes takes on disk."""
PRINT = fingerprint("model", "revision", KvLayout(16, "float32", "HND", 2, 2, 32, SIZE))


@dataclass
class Bench:
    """Tiers over one medium, made anew for each test; `open` gives another instance over what is there."""

    open: Callable[[], KvTier]
    tiers: list[KvTier] = field(default_factory=list)

    def tier(self) -> KvTier:
        tier = self.open()
        self.tiers.append(tier)
        settle(tier)
        return tier


def redis_spec(server: RedisServer, **changes: object) -> RedisTierSpec:
    # A loaded machine takes its time; the deadlines have tests of their own.
    return RedisTierSpec.model_validate(
        {"url": server.url, "timeout_s": 20.0, "lookup_timeout_s": 10.0, **changes}
    )


@pytest.fixture(params=["disk", "redis"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    def disk() -> KvTier:
        spec = DiskTierSpec(path=str(tmp_path / "tier"), bytes=ROOM * FOOTPRINT, timeout_s=20.0)
        return DiskTier(spec, PRINT, SIZE)

    if request.param == "disk":
        made = Bench(disk)
    else:
        server: RedisServer = request.getfixturevalue("redis")
        assert server.ask("FLUSHALL") == "+OK"
        made = Bench(lambda: RedisTier(redis_spec(server), PRINT, SIZE))
    yield made
    for tier in made.tiers:
        tier.close()


def settle(tier: KvTier) -> TierChange:
    """All that the tier does for itself at once."""
    stored: list[TierBlock] = []
    removed: list[TierBlock] = []
    while (change := tier.maintain()) != TierChange() or tier.maintenance_pending:
        stored += change.stored
        removed += change.removed
    return TierChange(tuple(stored), tuple(removed))


def content(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def keys(numbers: Sequence[int]) -> list[bytes]:
    return [block(number).key for number in numbers]


def put(tier: KvTier, *numbers: int) -> TierChange:
    """The bytes are gone when the call returns, as the port allows."""
    kept = [bytearray(content(number)) for number in numbers]
    change = tier.put(
        [TierWrite(block(n), memoryview(data).toreadonly()) for n, data in zip(numbers, kept, strict=True)]
    )
    for data in kept:
        data[:] = bytes(SIZE)
    return change


def get(tier: KvTier, *numbers: int) -> list[bytes]:
    targets = [bytearray(SIZE) for _ in numbers]
    count = tier.get([TierRead(key, memoryview(t)) for key, t in zip(keys(numbers), targets, strict=True)])
    return [bytes(target) for target in targets[:count]]


def test_blocks_come_back_byte_for_byte(bench: Bench) -> None:
    tier = bench.tier()
    assert put(tier, 1, 2, 3) == TierChange((block(1), block(2), block(3)), ())
    assert tier.lookup(keys([1, 2, 3])) == 3
    assert get(tier, 1, 2, 3) == [content(1), content(2), content(3)]
    assert get(tier, 3, 1) == [content(3), content(1)]
    assert set(tier.held()) == {block(1), block(2), block(3)}


def test_only_leading_blocks_count(bench: Bench) -> None:
    tier = bench.tier()
    put(tier, *range(100), *range(101, 200))
    assert tier.lookup(keys(range(200))) == 100
    assert tier.lookup(keys([101, 100, 102])) == 1
    assert tier.lookup(keys([100])) == tier.lookup([]) == 0
    assert get(tier, *range(98, 103)) == [content(98), content(99)]
    assert get(tier, 100, 1) == get(tier) == []
    # What was left unread has not got into what is read next.
    assert get(tier, 7, 8) == [content(7), content(8)]


def test_a_block_that_is_there_is_not_stored_again(bench: Bench) -> None:
    tier = bench.tier()
    put(tier, 1)
    before = tier.load()
    assert put(tier, 1, 2).stored == (block(2),)
    assert tier.load().stored_blocks - before.stored_blocks == 1
    assert get(tier, 1, 2) == [content(1), content(2)]


def test_dropped_blocks_are_gone_and_unknown_ones_are_ignored(bench: Bench) -> None:
    tier = bench.tier()
    put(tier, 1, 2, 3)
    assert tier.drop(keys([2, 9])) == TierChange((), (block(2),))
    assert tier.drop(keys([2])) == TierChange()
    assert tier.lookup(keys([2])) == 0
    assert get(tier, 1, 2) == [content(1)]
    assert set(tier.held()) == {block(1), block(3)}
    assert put(tier, 2).stored == (block(2),)
    assert get(tier, 1, 2, 3) == [content(1), content(2), content(3)]


@pytest.mark.parametrize("bench", ["disk"], indirect=True)
def test_a_bounded_tier_lets_go_of_others_and_says_so(bench: Bench) -> None:
    tier = bench.tier()
    for number in range(ROOM):
        put(tier, number)
    full = tier.load()
    assert (full.blocks, full.evicted_blocks) == (ROOM, 0)
    change = put(tier, 1000, 1001)
    assert set(change.stored) == {block(1000), block(1001)}
    assert len(change.removed) == 2
    load = tier.load()
    assert (load.blocks, load.evicted_blocks) == (ROOM, 2)
    assert load.bytes_used <= load.bytes_capacity
    assert tier.lookup([change.removed[0].key]) == 0
    assert get(tier, 1000, 1001) == [content(1000), content(1001)]


@pytest.mark.parametrize("seed", range(3))
def test_changes_add_up_to_what_is_held_and_no_read_gives_other_bytes(bench: Bench, seed: int) -> None:
    tier, rng = bench.tier(), Random(seed)
    known_blocks: set[TierBlock] = set()
    for _ in range(150):
        first = rng.randrange(2 * ROOM)
        numbers = range(first, first + rng.randrange(1, 30))
        change = TierChange()
        match rng.randrange(5):
            case 0:
                change = tier.drop(keys(numbers))
            case 1:
                found = get(tier, *numbers)
                assert found == [content(number) for number in numbers[: len(found)]]
                assert len(found) == tier.lookup(keys(numbers))
            case 2:
                change = tier.maintain()
            case _:
                change = put(tier, *numbers)
        assert not set(change.stored) & set(change.removed)
        known_blocks = known_blocks - set(change.removed) | set(change.stored)
    change = settle(tier)
    assert known_blocks - set(change.removed) | set(change.stored) == set(tier.held())
    assert tier.load().blocks == len(set(tier.held())) > 0
    for held in tier.held():
        assert get(tier, held.parent) == [content(held.parent)]


def test_levels_and_counters_say_what_was_done(bench: Bench) -> None:
    tier = bench.tier()
    put(tier, 1, 2, 3)
    get(tier, 1, 2, 9)
    get(tier, 3)
    get(tier, 9)
    load = tier.load()
    assert load.medium is tier.medium is not Medium.DEVICE
    assert (load.blocks, load.stored_blocks, load.stored_bytes) == (3, 3, 3 * SIZE)
    assert (load.loads, load.loaded_blocks, load.loaded_bytes) == (2, 3, 3 * SIZE)
    assert load.bytes_used >= 3 * SIZE
    assert load.load_s > 0
    assert (load.corrupt_blocks, load.dropped_blocks, load.failures, load.trouble) == (0, 0, 0, "")


def test_after_close_everything_is_a_miss(bench: Bench) -> None:
    tier = bench.tier()
    put(tier, 1)
    tier.close()
    tier.close()
    assert tier.lookup(keys([1])) == 0
    assert get(tier, 1) == []
    assert put(tier, 2).stored == ()
    assert tier.drop(keys([1])).stored == tier.maintain().stored == ()
    assert tier.load().medium is tier.medium


def test_what_is_kept_outlives_its_instance(bench: Bench) -> None:
    first = bench.tier()
    put(first, *range(50))
    first.close()
    second = bench.tier()
    assert second.lookup(keys(range(60))) == 50
    assert get(second, *range(60)) == [content(number) for number in range(50)]
    second.maintain()
    assert set(second.held()) == {block(number) for number in range(50)}


def test_workers_share_what_is_in_redis_and_each_tells_what_it_has_seen(redis: RedisServer) -> None:
    redis.ask("FLUSHALL")
    one, other = (RedisTier(redis_spec(redis), PRINT, SIZE) for _ in range(2))
    put(one, 1, 2)
    assert other.lookup(keys([1, 2, 3])) == 2
    assert list(other.held()) == []
    assert get(other, 1) == [content(1)]
    assert settle(other) == TierChange((block(1),), ())
    assert put(other, 1, 2) == TierChange((block(2),), ())
    assert other.load().stored_blocks == 0
    one.drop(keys([1]))
    assert settle(other) == TierChange((), (block(1),))
    one.close()
    other.close()


def test_databases_and_namespaces_are_apart(redis: RedisServer) -> None:
    redis.ask("FLUSHALL")
    apart = [{}, {"url": f"redis://{redis.address}/3"}, {"namespace": "two"}]
    tiers = [RedisTier(redis_spec(redis, **changes), PRINT, SIZE) for changes in apart]
    for number, tier in enumerate(tiers):
        assert put(tier, number).stored == (block(number),)
    for number, tier in enumerate(tiers):
        assert [tier.lookup(keys([each])) for each in range(3)] == [int(each == number) for each in range(3)]
        tier.close()
    assert redis.ask("DBSIZE") == ":2"


def test_a_block_in_redis_lives_on_while_it_is_asked_for(redis: RedisServer) -> None:
    redis.ask("FLUSHALL")
    tier = RedisTier(redis_spec(redis, ttl_s=1000), PRINT, SIZE)
    put(tier, 1)
    name = f"kvasir:{PRINT.hex()}:{block(1).key.hex()}"
    assert 990 <= int(redis.ask("TTL", name)[1:]) <= 1000
    for use in (lambda: get(tier, 1), lambda: put(tier, 1)):
        redis.ask("EXPIRE", name, "5")
        use()
        assert int(redis.ask("TTL", name)[1:]) > 900
    redis.ask("EXPIRE", name, "5")
    tier.lookup(keys([1]))
    assert int(redis.ask("TTL", name)[1:]) <= 5
    tier.close()


def test_blocks_larger_than_a_value_may_be_are_not_kept_in_redis(redis: RedisServer) -> None:
    tier = RedisTier(redis_spec(redis, max_value_bytes=SIZE), PRINT, SIZE)
    redis.ask("FLUSHALL")
    assert put(tier, 1) == settle(tier) == TierChange()
    assert "raise tiers.redis.max_value_bytes" in tier.load().trouble
    assert tier.load().dropped_blocks == 1
    assert redis.ask("DBSIZE") == ":0"
    tier.close()


def test_names_in_redis_are_bounded(redis: RedisServer) -> None:
    redis.ask("FLUSHALL")
    tier = RedisTier(redis_spec(redis), PRINT, SIZE, most_blocks=10)
    put(tier, *range(10))
    get(tier, 0)
    assert put(tier, 100) == TierChange((block(100),), (block(1),))
    assert len(list(tier.held())) == 10
    assert get(tier, 1) == [content(1)]
    tier.close()


def test_more_connections_than_blocks_and_windows_read_the_same(redis: RedisServer) -> None:
    redis.ask("FLUSHALL")
    tier = RedisTier(redis_spec(redis, connections=7), PRINT, SIZE)
    put(tier, *range(3))
    assert get(tier, 0, 1, 2, 3) == [content(number) for number in range(3)]
    put(tier, *range(200))
    assert get(tier, *range(201)) == [content(number) for number in range(200)]
    assert int(redis.info("clients")["connected_clients"]) == 8
    tier.close()


def test_after_a_hole_little_more_is_asked_for(redis: RedisServer) -> None:
    redis.ask("FLUSHALL")
    size = 1 << 20
    tier = RedisTier(redis_spec(redis), PRINT, size)
    redis.ask("CONFIG", "RESETSTAT")
    assert tier.get([TierRead(block(number).key, memoryview(bytearray(size))) for number in range(40)]) == 0
    calls = int(redis.info("commandstats")["cmdstat_getrange"].partition("calls=")[2].partition(",")[0])
    assert 1 <= calls <= 8
    tier.close()


def test_a_shared_tier_is_named_by_its_place_and_its_blocks() -> None:
    spec = RedisTierSpec(url="redis://host:1/0", username="user", password_file="/secret")
    other = fingerprint("model", "other", KvLayout(16, "float32", "HND", 2, 2, 32, SIZE))
    named = shared_tier(spec, PRINT)
    assert named == shared_tier(RedisTierSpec(url="redis://host:1/0", ttl_s=1), PRINT)
    others = {
        shared_tier(RedisTierSpec(url="redis://host:1/1"), PRINT),
        shared_tier(RedisTierSpec(url="redis://host:1/0", namespace="two"), PRINT),
        shared_tier(spec, other),
    }
    assert len(others | {named}) == 4
