"""The part of the deployment spec for Redis servers: address and credentials."""

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
    """A Redis server and its credentials."""

    url: str
    """`redis://host:port/db`, or `rediss://` with TLS, without credentials."""
    username: str | None = None
    password_file: str | None = None
    """File with the password. It is read for every connection, so it can be rotated."""
    ca_file: str | None = None
    """PEM certificates of the authorities that certify the server, with `rediss://` only. Unset: those of the
    system."""

    @field_validator("url")
    @classmethod
    def _an_address(cls, value: str) -> str:
        if _REDIS.fullmatch(value) is None:
            raise ValueError(
                "redis://host:port/db or rediss://host:port/db, without credentials (set username and "
                "password_file), as in redis://127.0.0.1:6379/0"
            )
        parts = urlsplit(value)
        # Both raise ValueError for an invalid address: a port above 65535, or an invalid host label.
        _ = parts.port
        (parts.hostname or "").encode("idna")
        return value

    @model_validator(mode="after")
    def _certified_by_someone(self) -> Self:
        if self.ca_file is not None and not self.url.startswith("rediss://"):
            raise ValueError("ca_file: the url does not use TLS; use rediss://, or leave ca_file unset")
        return self


class LimitsRedisSpec(RedisServerSpec):
    """The Redis in which routers share the usage counters of tenants."""

    namespace: Name = "kvasir"
    """Prefix of keys. Routers that share counters use the same one, other deployments a different one."""
    timeout_s: float = Field(default=0.05, gt=0, le=5)
    """Timeout of a query. After it, the router decides from its own counters until the server answers
    again."""


class LeaseRedisSpec(RedisServerSpec):
    """The Redis in which routers agree who works on a batch."""

    namespace: Name = "kvasir"
    """Prefix of keys. Routers that share batches use the same one, other deployments a different one."""
    timeout_s: float = Field(default=2.0, gt=0, le=10)
    """Timeout of a query."""


class CostRedisSpec(RedisServerSpec):
    """The Redis in which routers keep what tenants have used."""

    namespace: Name = "kvasir"
    """Prefix of keys. Routers that share costs use the same one, other deployments a different one."""
    timeout_s: float = Field(default=2.0, gt=0, le=30)
    """Timeout of a query. What could not be written is written with the next query."""
