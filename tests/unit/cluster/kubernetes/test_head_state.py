"""Keys of Ray's head in Redis: those of one namespace are deleted, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.lab.redis_server import RedisServer
from tests.kit.programs import program

from kvasir.config.spec.redis import RedisServerSpec
from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.kubernetes.head_state import delete_head_state, key_pattern


def test_a_namespace_is_taken_by_the_letter() -> None:
    assert key_pattern("uid-7") == r"RAYuid\-7@*"
    assert key_pattern("a*[b]?") == r"RAYa\*\[b\]\?@*"


async def test_all_keys_of_the_namespace_are_deleted_and_no_others(tmp_path: Path) -> None:
    program("redis-server")
    with RedisServer(tmp_path) as redis:
        for number in range(25):
            redis.ask("SET", f"RAYuid-7@table-{number}", "x")
        others = ("RAYuid-70@KV", "RAYuid@KV", "kvasir:limits:a", "xRAYuid-7@KV")
        for key in others:
            redis.ask("SET", key, "x")
        server = RedisServerSpec(url=f"redis://{redis.address}")
        assert await delete_head_state(server, "uid-7", 5.0) == 25
        assert await delete_head_state(server, "uid-7", 5.0) == 0
        assert [redis.ask("EXISTS", key) for key in others] == [":1"] * len(others)


async def test_a_server_that_refuses_the_login_is_named(tmp_path: Path) -> None:
    program("redis-server")
    with RedisServer(tmp_path, "--requirepass", "p", password="p") as redis:
        server = RedisServerSpec(url=f"redis://{redis.address}")
        with pytest.raises(ConfigError, match=rf"Redis at {redis.address}: .*uthentication"):
            await delete_head_state(server, "uid-7", 5.0)
