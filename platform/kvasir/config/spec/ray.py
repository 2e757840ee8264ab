"""The deployment spec's part about Ray, which places and watches the workers."""

from __future__ import annotations

import re

from pydantic import field_validator

from kvasir.config.spec.base import Spec

_REDIS = re.compile(
    r"(?:rediss?://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?):(\d{1,5})"
)


class RaySpec(Spec):
    """Ray's own state. Serving does not depend on Ray's head; starting and replacing workers does."""

    head_redis_url: str | None = None
    """Where Ray's head keeps its state: `redis://host:port`, or `rediss://` with TLS. Unset: in a folder of
    this machine, which outlives the head's process, but not the machine."""

    @field_validator("head_redis_url")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        address = _REDIS.fullmatch(value)
        if address is None or not 0 < int(address[1]) <= 65535:
            raise ValueError(
                "redis://host:port or rediss://host:port, without credentials (they would stand in the "
                "arguments of Ray's processes), as in redis://127.0.0.1:6379"
            )
        return value
