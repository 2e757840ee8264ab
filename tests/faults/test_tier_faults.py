"""A tier in trouble is a miss: no wrong bytes, no error, one line of the log, over when the trouble is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kvasir.clock import MonotonicClock
from kvasir.config.spec_tiers import DiskTierSpec, RedisTierSpec
from kvasir.core.identity import KvLayout
from kvasir.ports.tier import KEY_BYTES, Block, Change, KvTier, Read, Write
from kvasir_platform.control.certificates import Authority
from kvasir_platform.sim.lab.proxy import DOWNSTREAM, Link, TcpProxy
from kvasir_platform.sim.lab.redis_server import RedisServer, find_redis
from kvasir_workers.tiers import blob
from kvasir_workers.tiers.blob import HEADER_BYTES, fingerprint, make_header
from kvasir_workers.tiers.breaker import BreakerLimits
from kvasir_workers.tiers.disk import DiskTier
from kvasir_workers.tiers.redis_tier import RedisTier

SIZE = 64 << 10
FOOTPRINT = 72 << 10
PATIENCE_S = 30.0
LAYOUT = KvLayout(16, "float32", "HND", 2, 2, 32, SIZE)
PRINT = fingerprint("model", "one", LAYOUT)
OTHER = fingerprint("model", "two", LAYOUT)
LIMITS = BreakerLimits(backoff_s=0.05, backoff_max_s=0.2)
needs_redis = pytest.mark.skipif(find_redis() is None, reason="redis-server is not installed")


def block(number: int) -> Block:
    return Block(number.to_bytes(2, "little") * (KEY_BYTES // 2), number + 1, number)


def content(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def put(tier: KvTier, *numbers: int) -> Change:
    return tier.put([Write(block(n), memoryview(content(n))) for n in numbers])


def get(tier: KvTier, *numbers: int) -> int:
    """How many blocks came; their bytes are always those that were put."""
    targets = [bytearray(SIZE) for _ in numbers]
    found = tier.get([Read(block(n).key, memoryview(t)) for n, t in zip(numbers, targets, strict=True)])
    assert [bytes(target) for target in targets[:found]] == [content(n) for n in numbers[:found]]
    return found


def lookup(tier: KvTier, *numbers: int) -> int:
    return tier.lookup([block(number).key for number in numbers])


def tend_until(tier: KvTier, condition: Callable[[], bool]) -> Change:
    """Let the tier see to itself; what it told meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    stored: list[Block] = []
    removed: list[Block] = []
    while True:
        change = tier.tend()
        stored += change.stored
        removed += change.removed
        if condition() and change == Change():
            return Change(tuple(stored), tuple(removed))
        assert time.monotonic() < deadline, tier.load()


def recover(tier: KvTier) -> Change:
    return tend_until(tier, lambda: tier.load().trouble == "")


def asked_in_vain(tier: KvTier) -> int:
    """How many calls fail before the tier is left alone, of very many."""
    before = tier.load().failures
    for _ in range(100):
        assert lookup(tier, 1) == get(tier, 1) == 0
        assert put(tier, 50).stored == ()
    assert tier.load().trouble
    return tier.load().failures - before


class Lines:
    """What the tiers wrote to the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def take(self) -> list[str]:
        found = [
            record.getMessage()
            for record in self._caplog.records
            if record.name.startswith("kvasir_workers.tiers")
        ]
        self._caplog.clear()
        return found


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO)
    return Lines(caplog)


# -- Redis -----------------------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    if find_redis() is None:
        pytest.skip("redis-server is not installed")
    with RedisServer(tmp_path) as server:
        yield server


def redis_tier(url: str, **spec: object) -> RedisTier:
    # Wide enough for a loaded machine, and far from what is waited for here.
    made = RedisTierSpec.model_validate({"url": url, "lookup_timeout_s": 0.5, "timeout_s": 1.0, **spec})
    return RedisTier(made, PRINT, SIZE, rng=Random(1), limits=LIMITS)


@pytest.fixture
def shared(redis: RedisServer) -> Iterator[RedisTier]:
    """A tier with blocks 1 to 4 in a Redis that is well."""
    tier = redis_tier(redis.url)
    tier.tend()
    assert len(put(tier, 1, 2, 3, 4).stored) == 4
    yield tier
    tier.close()


def test_a_frozen_redis_costs_one_deadline_and_comes_back(
    redis: RedisServer, shared: RedisTier, lines: Lines
) -> None:
    redis.freeze()
    assert asked_in_vain(shared) == 1
    assert "did not answer in time" in shared.load().trouble
    tend_until(shared, lambda: shared.load().failures >= 3)
    redis.thaw()
    # Nothing of before is left to be taken for the answer to another question.
    deadline = time.monotonic() + PATIENCE_S
    while redis.info("clients")["connected_clients"] != "1":
        assert time.monotonic() < deadline, "connections are left open"
    assert recover(shared) == Change()
    assert get(shared, 1, 2, 3, 4) == 4
    down, up = lines.take()
    assert "is not used for the time being: 127.0.0.1" in down
    assert "is used again" in up


def test_a_killed_redis_that_comes_back_empty_is_a_miss_and_what_is_gone_is_told(
    redis: RedisServer, shared: RedisTier, lines: Lines
) -> None:
    redis.kill()
    assert asked_in_vain(shared) == LIMITS.failures
    assert "cannot be reached" in shared.load().trouble
    redis.start()
    assert set(recover(shared).removed) == {block(number) for number in (1, 2, 3, 4)}
    assert list(shared.held()) == []
    assert lookup(shared, 1) == get(shared, 1) == 0
    assert put(shared, 1, 2).stored == (block(1), block(2))
    assert get(shared, 1, 2) == 2
    assert len(lines.take()) == 2


def test_a_restart_between_two_calls_is_no_trouble(
    redis: RedisServer, shared: RedisTier, lines: Lines
) -> None:
    redis.kill()
    redis.start()
    assert lookup(shared, 1) == 0
    assert put(shared, 1).stored == ()
    assert get(shared, 1) == 1
    assert (shared.load().failures, shared.load().trouble, lines.take()) == (0, "", [])


@pytest.mark.parametrize(
    "commands",
    [
        ("CONFIG SET maxmemory 1mb", "CONFIG SET maxmemory 0", "raise its maxmemory"),
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "address of the primary"),
        ("ACL SETUSER default -set", "ACL SETUSER default +set", "allow the user"),
    ],
    ids=["full", "replica", "forbidden"],
)
def test_a_redis_that_takes_no_writes_is_still_read(
    redis: RedisServer, shared: RedisTier, lines: Lines, commands: tuple[str, str, str]
) -> None:
    fault, cure, remedy = commands
    assert redis.ask(*fault.split()) == "+OK"
    for number in range(10, 40):
        assert put(shared, number) == Change()
    assert remedy in shared.load().trouble
    assert shared.load().failures == 1
    assert shared.load().dropped_blocks == 30
    assert get(shared, 1, 2, 3, 4) == 4
    tend_until(shared, lambda: shared.load().failures >= 3)
    assert redis.ask(*cure.split()) == "+OK"
    recover(shared)
    assert put(shared, 10).stored == (block(10),)
    assert get(shared, 1, 10) == 2
    down, up = lines.take()
    assert remedy in down
    assert "for writing, is used again" in up


def test_a_login_that_is_refused_is_told_and_a_changed_password_is_read_again(
    tmp_path: Path, lines: Lines
) -> None:
    with RedisServer(tmp_path, "--requirepass", "right horse", password="right horse") as server:
        secret = tmp_path / "password"
        tier = redis_tier(server.url, password_file=str(secret))
        assert asked_in_vain(tier) == LIMITS.failures
        assert "see to password_file" in tier.load().trouble
        secret.write_text("wrong battery\n")
        tend_until(tier, lambda: "refuses the login" in tier.load().trouble)
        secret.write_text("right horse\n")
        recover(tier)
        put(tier, 1)
        assert get(tier, 1) == 1
        tier.close()
    told = lines.take()
    assert len(told) == 2
    assert not any(word in line for line in told for word in ("horse", "battery"))


def test_a_user_of_its_own_logs_in_with_its_name(redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("battery\n")
    assert redis.ask("ACL", "SETUSER", "worker", "on", ">battery", "~kvasir:*", "+@all") == "+OK"
    assert redis.ask("ACL", "SETUSER", "default", "off") == "+OK"
    tier = redis_tier(redis.url, username="worker", password_file=str(tmp_path / "password"))
    put(tier, 1)
    assert get(tier, 1) == 1
    tier.close()
    stranger = redis_tier(redis.url)
    assert asked_in_vain(stranger) == LIMITS.failures
    assert "refuses the login" in stranger.load().trouble
    stranger.close()


async def test_a_redis_that_is_too_slow_to_ask_is_left_alone_until_it_is_quick(
    redis: RedisServer, lines: Lines
) -> None:
    async with TcpProxy(redis.address, clock=MonotonicClock(), rng=Random(1)) as proxy:
        tier = redis_tier(f"redis://{proxy.address}/0", lookup_timeout_s=0.2, timeout_s=5.0)
        await asyncio.to_thread(put, tier, 1)
        proxy.shape(DOWNSTREAM, Link(delay_s=1.0))
        assert await asyncio.to_thread(lookup, tier, 1) == 0
        assert await asyncio.to_thread(asked_in_vain, tier) == 0
        assert proxy.counts.delayed > 0
        # A trial is quick to answer or has failed: mere answers are not enough.
        await asyncio.to_thread(tend_until, tier, lambda: tier.load().failures >= 2)
        assert tier.load().trouble
        proxy.shape(DOWNSTREAM, Link())
        await asyncio.to_thread(recover, tier)
        assert await asyncio.to_thread(get, tier, 1) == 1
        tier.close()
    assert len(lines.take()) == 2


async def test_a_redis_that_trickles_ends_at_the_deadline_and_is_tried_with_a_block(
    redis: RedisServer, lines: Lines
) -> None:
    async with TcpProxy(redis.address, clock=MonotonicClock(), rng=Random(1)) as proxy:
        tier = redis_tier(f"redis://{proxy.address}/0", timeout_s=0.6)
        await asyncio.to_thread(put, tier, 1, 2, 3, 4)
        proxy.shape(DOWNSTREAM, Link(bytes_per_s=20e3, slice_bytes=500))
        assert await asyncio.to_thread(lookup, tier, 1, 2, 3, 4) == 4
        assert await asyncio.to_thread(get, tier, 1, 2, 3, 4) == 0
        assert await asyncio.to_thread(asked_in_vain, tier) == 0
        # What was not read any more shall not delay the trials, whose questions are answered at once.
        proxy.shape(DOWNSTREAM, Link(bytes_per_s=20e3, slice_bytes=500))
        await asyncio.to_thread(tend_until, tier, lambda: tier.load().failures >= 2)
        assert tier.load().trouble
        proxy.shape(DOWNSTREAM, Link())
        await asyncio.to_thread(recover, tier)
        assert await asyncio.to_thread(get, tier, 1, 2, 3, 4) == 4
        tier.close()
    assert len(lines.take()) == 2


async def test_a_connection_that_breaks_gives_no_block_that_was_not_whole(redis: RedisServer) -> None:
    async with TcpProxy(redis.address, clock=MonotonicClock(), rng=Random(1)) as proxy:
        tier = redis_tier(f"redis://{proxy.address}/0", connections=1)
        await asyncio.to_thread(put, tier, 1, 2, 3, 4)
        proxy.shape(DOWNSTREAM, Link(cut_after=2 * SIZE + SIZE // 2))
        # A reset also takes what had arrived and was not read yet.
        assert await asyncio.to_thread(get, tier, 1, 2, 3, 4) <= 2
        assert proxy.counts.cuts == 1
        assert (tier.load().failures, tier.load().trouble) == (1, "")
        assert await asyncio.to_thread(get, tier, 1, 2, 3, 4) == 4
        tier.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-MOVED 3999 127.0.0.1:6381\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"+PONG\r\n",
        b"*1\r\n:1\r\n",
        b"$7\r\nawesome\r\n",
    ],
    ids=lambda answer: answer.split()[0].decode().strip("-+*:$"),
)
def test_whatever_else_answers_there_is_a_miss(answer: bytes, lines: Lines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer, contextlib.suppress(OSError):
                    while peer.recv(1 << 16):
                        # A question may be two commands.
                        peer.sendall(answer * 2)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        tier = redis_tier(f"redis://127.0.0.1:{server.getsockname()[1]}/0")
        assert asked_in_vain(tier) == LIMITS.failures
        assert tier.load().trouble
        tier.close()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(lines.take()) == 1


def sound(number: int, mark: bytes = PRINT, key: int | None = None) -> bytes:
    """A blob of a block's bytes, as it is kept."""
    kept = block(number) if key is None else Block(block(key).key, number + 1, number)
    return make_header(mark, kept, memoryview(content(number))) + content(number)


def flipped(at: int) -> bytes:
    raw = bytearray(sound(2))
    raw[at] ^= 16
    return bytes(raw)


WRONG_BLOBS = {
    "empty": ("truncated", b""),
    "garbage": ("magic", Random(1).randbytes(len(sound(2)))),
    "cut in its header": ("truncated", sound(2)[:50]),
    "cut in its bytes": ("truncated", sound(2)[:-1]),
    "too long": ("length", sound(2) + b"x"),
    "a bit of its header flipped": ("checksum", flipped(HEADER_BYTES - 20)),
    "its first bit flipped": ("magic", flipped(0)),
    "a bit of its bytes flipped": ("checksum", flipped(HEADER_BYTES + SIZE // 2)),
    "an old version's": ("version", sound(2)[:8] + bytes([blob.VERSION - 1, 0]) + sound(2)[10:]),
    "another model's": ("fingerprint", sound(2, OTHER)),
    "another key's": ("key", sound(3)),
}


@pytest.mark.parametrize("kind", [kind for kind in WRONG_BLOBS if kind != "empty"])
def test_a_wrong_value_in_redis_is_a_miss_deleted_and_stored_again(
    redis: RedisServer, shared: RedisTier, lines: Lines, kind: str
) -> None:
    reason, raw = WRONG_BLOBS[kind]
    name = f"kvasir:{PRINT.hex()}:{block(2).key.hex()}"
    assert redis.ask("SET", name, raw) == "+OK"
    assert lookup(shared, 1, 2, 3) == 3
    assert get(shared, 1, 2, 3) == 1
    assert shared.refused == {reason: 1}
    assert (shared.load().corrupt_blocks, shared.load().trouble) == (1, "")
    (line,) = lines.take()
    assert f"not the block it should be ({reason})" in line
    assert redis.ask("EXISTS", name) == ":0"
    assert put(shared, 2).removed == ()
    assert get(shared, 1, 2, 3) == 3


def test_a_key_of_another_type_in_redis_is_a_miss(redis: RedisServer, shared: RedisTier) -> None:
    name = f"kvasir:{PRINT.hex()}:{block(9).key.hex()}"
    assert redis.ask("RPUSH", name, "a", "b") == ":2"
    assert get(shared, 9) == 0
    assert shared.refused == {"type": 1}
    assert put(shared, 9).stored == (block(9),)
    assert get(shared, 1, 9) == 2


def test_a_server_with_tls_is_used_only_with_a_certificate_of_ours(tmp_path: Path, lines: Lines) -> None:
    day, now = 86_400.0, time.time()
    ours, theirs = (Authority.make(name, now - day, now + day) for name in ("ours", "theirs"))
    for name, authority in (("ours", ours), ("theirs", theirs)):
        (tmp_path / f"{name}.pem").write_bytes(authority.pem)
    (tmp_path / "server.pem").write_bytes(ours.certify("spiffe://redis", "localhost", now - day, now + day))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server_file, ca = str(tmp_path / "server.pem"), str(tmp_path / "ours.pem")
    options = ["--tls-port", port, "--tls-cert-file", server_file, "--tls-key-file", server_file]
    with RedisServer(tmp_path, *options, "--tls-ca-cert-file", ca, "--tls-auth-clients", "no"):
        good = redis_tier(f"rediss://localhost:{port}/0", ca_file=ca)
        put(good, 1, 2)
        assert get(good, 1, 2) == 2
        good.close()
        assert lines.take() == []
        for ca_file in (str(tmp_path / "theirs.pem"), None):
            bad = redis_tier(f"rediss://localhost:{port}/0", ca_file=ca_file)
            assert asked_in_vain(bad) == LIMITS.failures
            assert "certificate verify failed" in bad.load().trouble
            bad.close()


# -- disk ------------------------------------------------------------------------------------------


def disk_tier(path: Path, room: int = 100) -> DiskTier:
    spec = DiskTierSpec(path=str(path), bytes=room * FOOTPRINT, timeout_s=20.0)
    return DiskTier(spec, PRINT, SIZE, rng=Random(1), limits=LIMITS)


def file_of(tier: DiskTier, path: Path, number: int) -> Path:
    (found,) = path.rglob(block(number).key.hex())
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of a megabyte of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a filesystem")
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "kvasir-test", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no filesystem can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_takes_nothing_more_and_is_still_read(small_disk: Path, lines: Lines) -> None:
    tier = disk_tier(small_disk)
    assert len(put(tier, 1, 2).stored) == 2
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(2 << 20))
    for number in range(10, 30):
        assert put(tier, number) == Change()
    assert "free space there, or lower tiers.disk.bytes" in tier.load().trouble
    assert tier.load().failures == 1
    assert list(small_disk.rglob("incoming")) == []
    assert get(tier, 1, 2) == 2
    tend_until(tier, lambda: tier.load().failures >= 3)
    filler.unlink()
    recover(tier)
    assert put(tier, 10).stored == (block(10),)
    assert get(tier, 1, 2, 10) == 3
    down, up = lines.take()
    assert "No space left on device" in down
    assert "for writing, is used again" in up
    tier.close()


def test_a_disk_that_becomes_read_only_is_still_read_also_after_a_restart(
    small_disk: Path, lines: Lines
) -> None:
    tier = disk_tier(small_disk)
    put(tier, 1, 2)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for number in range(10, 30):
        assert put(tier, number) == Change()
    assert "mount it writable" in tier.load().trouble
    assert get(tier, 1, 2) == 2
    tier.close()
    assert len(lines.take()) == 1
    again = disk_tier(small_disk)
    tend_until(again, lambda: True)
    assert "mount it writable" in again.load().trouble
    assert get(again, 1, 2) == 2
    assert put(again, 10) == Change()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    recover(again)
    assert put(again, 10).stored == (block(10),)
    assert len(lines.take()) == 2
    again.close()


def test_a_folder_that_vanishes_is_told_and_made_anew(tmp_path: Path, lines: Lines) -> None:
    tier = disk_tier(tmp_path / "tier")
    put(tier, 1, 2)
    shutil.rmtree(tmp_path / "tier" / "slot-0")
    assert get(tier, 1) == 0
    assert asked_in_vain(tier) == 0
    assert tier.load().failures == 1
    recover(tier)
    assert list(tier.held()) == []
    assert put(tier, 3).stored == (block(3),)
    assert get(tier, 3) == 1
    assert len(lines.take()) == 2
    tier.close()


def test_a_path_that_is_no_folder_is_told_and_used_once_it_is_one(tmp_path: Path, lines: Lines) -> None:
    path = tmp_path / "tier"
    path.write_text("a file")
    tier = disk_tier(path)
    assert asked_in_vain(tier) == 0
    assert str(path) in tier.load().trouble
    path.unlink()
    recover(tier)
    put(tier, 1)
    assert get(tier, 1) == 1
    assert len(lines.take()) == 2
    tier.close()


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("kind", WRONG_BLOBS)
def test_a_wrong_file_is_a_miss_deleted_and_written_again(
    tmp_path: Path, lines: Lines, kind: str, restarted: bool
) -> None:
    reason, raw = WRONG_BLOBS[kind]
    tier = disk_tier(tmp_path)
    put(tier, 1, 2, 3)
    path = file_of(tier, tmp_path, 2)
    path.write_bytes(raw)
    if restarted:
        tier.close()
        tier = disk_tier(tmp_path)
        tend_until(tier, lambda: True)
    assert get(tier, 1, 2, 3) == 1
    assert tier.refused == {reason: 1}
    assert (tier.load().corrupt_blocks, tier.load().trouble) == (1, "")
    (line,) = lines.take()
    assert f"not the block it should be ({reason})" in line
    assert not path.exists()
    put(tier, 2)
    assert get(tier, 1, 2, 3) == 3
    tier.close()


def test_two_files_that_changed_places_are_both_misses(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    put(tier, 1, 2, 3)
    one, two = file_of(tier, tmp_path, 1), file_of(tier, tmp_path, 2)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert get(tier, 1) == get(tier, 2) == 0
    assert get(tier, 3) == 1
    assert tier.refused == {"key": 2}
    tier.close()


@pytest.mark.parametrize("how", ["deleted", "a folder", "a link to a sound one"])
def test_a_file_that_is_none_any_more_is_a_miss(tmp_path: Path, how: str) -> None:
    tier = disk_tier(tmp_path)
    put(tier, 1, 2, 3)
    path = file_of(tier, tmp_path, 2)
    if how == "a link to a sound one":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        if how == "a folder":
            path.mkdir()
    assert get(tier, 1, 2, 3) == 1
    assert get(tier, 3) == 1
    assert tier.tend().removed == (block(2),)
    assert tier.load().trouble == ""
    tier.close()
