"""What Ray's head stored in Redis: removed with the RayCluster, as KubeRay's clean-up Job does where it can
log in.

Ray keeps each of its tables in one hash, whose key is `RAY`, the storage namespace, `@`, and the table's name
(ray/src/ray/gcs/store_client/redis_store_client.cc). KubeRay makes the RayCluster's UID the namespace.
"""

from __future__ import annotations

import re

from kvasir.config.spec.redis import RedisServerSpec
from kvasir.core.errors import ConfigError
from kvasir_platform.gateway.tenants.redis_connection import (
    RedisFailure,
    connected,
    deadline,
    exchange,
    where,
)

_SCAN_KEYS = 1000
_SPECIAL = re.compile(r"[\[\]*?^\\-]")


def key_pattern(storage_namespace: str) -> str:
    """Return the glob pattern of Redis that matches the keys of that namespace and no others."""
    return "RAY" + _SPECIAL.sub(r"\\\g<0>", storage_namespace) + "@*"


async def delete_head_state(server: RedisServerSpec, storage_namespace: str, within_s: float) -> int:
    """Delete all keys of that namespace, and return how many there were. Raises ConfigError for a server that
    cannot be used, or takes longer than `within_s` seconds in all."""
    deleted, cursor = 0, b"0"
    pattern = key_pattern(storage_namespace)
    try:
        async with connected(server, within_s) as connection, deadline(within_s):
            while True:
                ((cursor, keys),) = await exchange(
                    connection, [("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_KEYS)]
                )
                # One by one: the slots of a proxy's servers differ.
                deleted += sum(map(int, await exchange(connection, [("UNLINK", key) for key in keys])))
                if cursor in (b"0", "0"):
                    return deleted
    except (RedisFailure, OSError) as error:
        raise ConfigError(f"Redis at {where(server)}: {error}") from error
