"""The deployment spec's part about a Redis: where it is and how to log in, for whatever is kept there."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from kvasir.config.spec.base import Name, Spec

_REDIS = re.compile(
    r"rediss?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?)(?::\d{1,5})?(?:/\d{1,3})?"
)


class RedisServerSpec(Spec):
    """A Redis server and how to reach it."""

    url: str
    """`redis://host:port/db`, or `rediss://` with TLS; without credentials."""
    username: str | None = None
    password_file: str | None = None
    """File with the password; read again for every connection, so that it can be rotated."""
    ca_file: str | None = None
    """Certificates that sign the server's; unset: those of the system. With `rediss://` only."""

    @field_validator("url")
    @classmethod
    def _an_address(cls, value: str) -> str:
        if _REDIS.fullmatch(value) is None:
            raise ValueError(
                "redis://host:port/db or rediss://host:port/db, without credentials (set username and "
                "password_file), as in redis://127.0.0.1:6379/0"
            )
        parts = urlsplit(value)
        # Both raise ValueError for what no socket takes: a port beyond 65535, a label that is no host's.
        _ = parts.port
        (parts.hostname or "").encode("idna")
        return value

    @model_validator(mode="after")
    def _certified_by_someone(self) -> Self:
        if self.ca_file is not None and not self.url.startswith("rediss://"):
            raise ValueError("ca_file: the url is without TLS; use rediss://, or leave ca_file unset")
        return self


class LimitsRedisSpec(RedisServerSpec):
    """The Redis in which several routers count what tenants use."""

    namespace: Name = "kvasir"
    """Keys begin with it. Routers that shall count together have the same, other deployments another."""
    timeout_s: float = Field(default=0.05, gt=0, le=5)
    """A question that takes longer is decided by what the router itself has counted, and so are all until
    the server answers again."""
