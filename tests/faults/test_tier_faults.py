"""A failing Redis is a cache miss: no wrong bytes, no error, one log line, and recovery with Redis."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.kit.engines.tier_blocks import (
    LIMITS,
    PATIENCE_S,
    PRINT,
    SIZE,
    WRONG_BLOBS,
    Lines,
    asked_in_vain,
    block,
    get,
    lookup,
    put,
    recover,
    tend_until,
)
from tests.kit.lab.proxy import DOWNSTREAM, Link, TcpProxy
from tests.kit.lab.redis_server import RedisServer
from tests.kit.processes import free_port

from kvasir.clock import MonotonicClock
from kvasir.config.spec.tiers import RedisTierSpec
from kvasir.ports.tier import TierChange
from kvasir_platform.cluster.certificates import Authority
from kvasir_workers.tiers.blobs.redis_tier import RedisTier


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
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
    tier.maintain()
    assert len(put(tier, 1, 2, 3, 4).stored) == 4
    yield tier
    tier.close()


def test_a_frozen_redis_costs_one_deadline_and_comes_back(
    redis: RedisServer, shared: RedisTier, lines: Lines
) -> None:
    redis.freeze()
    assert asked_in_vain(shared) == 1
    assert "did not answer in time" in shared.load().trouble
    assert not shared.load().readable
    tend_until(shared, lambda: shared.load().failures >= 3)
    redis.thaw()
    # Nothing of before is left to be taken for the answer to another question.
    deadline = time.monotonic() + PATIENCE_S
    while redis.info("clients")["connected_clients"] != "1":
        assert time.monotonic() < deadline, "connections are left open"
    assert recover(shared) == TierChange()
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
        assert put(shared, number) == TierChange()
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
        assert "check password_file" in tier.load().trouble
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


@pytest.mark.parametrize("kind", [kind for kind in WRONG_BLOBS if kind != "empty"])
def test_a_wrong_value_in_redis_is_a_miss_deleted_and_stored_again(
    redis: RedisServer, shared: RedisTier, lines: Lines, kind: str
) -> None:
    reason, raw = WRONG_BLOBS[kind]
    name = f"kvasir:{PRINT.hex()}:{block(2).key.hex()}"
    assert redis.ask("SET", name, raw) == "+OK"
    assert lookup(shared, 1, 2, 3) == 3
    assert get(shared, 1, 2, 3) == 1
    assert (shared.load().corrupt_blocks, shared.load().trouble) == (1, "")
    (line,) = lines.take()
    assert f"not the block it should be ({reason})" in line
    assert redis.ask("EXISTS", name) == ":0"
    assert put(shared, 2).removed == ()
    assert get(shared, 1, 2, 3) == 3


def test_a_key_of_another_type_in_redis_is_a_miss(
    redis: RedisServer, shared: RedisTier, lines: Lines
) -> None:
    name = f"kvasir:{PRINT.hex()}:{block(9).key.hex()}"
    assert redis.ask("RPUSH", name, "a", "b") == ":2"
    assert get(shared, 9) == 0
    assert shared.load().corrupt_blocks == 1
    (line,) = lines.take()
    assert "(type)" in line
    assert put(shared, 9).stored == (block(9),)
    assert get(shared, 1, 9) == 2


def test_a_server_with_tls_is_used_only_with_a_certificate_of_ours(tmp_path: Path, lines: Lines) -> None:
    day, now = 86_400.0, time.time()
    ours, theirs = (Authority.make(name, now - day, now + day) for name in ("ours", "theirs"))
    for name, authority in (("ours", ours), ("theirs", theirs)):
        (tmp_path / f"{name}.pem").write_bytes(authority.pem)
    (tmp_path / "server.pem").write_bytes(ours.certify("spiffe://redis", "localhost", now - day, now + day))
    port = str(free_port())
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
