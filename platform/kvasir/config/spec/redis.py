"""The part of the deployment spec for servers that keep data: Redis and S3, by address."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from kvasir.config.spec.base import Name, Spec

_REDIS = re.compile(
    r"rediss?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?)(?::\d{1,5})?(?:/\d{1,3})?"
)
_ENDPOINT = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?)(?::\d{1,5})?"
)
_BUCKET = re.compile(
    r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9])((?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)/?"
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


class S3ServerSpec(Spec):
    """The S3-compatible server of an `s3://` URL. Credentials are those of the environment, AWS_ACCESS_KEY_ID
    and AWS_SECRET_ACCESS_KEY, or of the role of the pod or the machine."""

    endpoint: str | None = None
    """`https://host:port` of a server other than Amazon's. With `http://`, whoever is on the way reads and
    changes the objects. Unset: Amazon S3, or AWS_ENDPOINT_URL."""
    region: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]{1,64}$")
    """Region of the bucket. Unset: AWS_REGION, or us-east-1."""
    ca_file: str | None = None
    """PEM certificates of authorities that certify the server, beside those of the system."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Timeout of a request: the download of a whole file, or the upload of 8 MiB of one."""

    @field_validator("endpoint")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if _ENDPOINT.fullmatch(value) is None:
            raise ValueError("https://host:port, without a path and without credentials")
        _ = urlsplit(value).port  # raises ValueError above 65535
        return value


def bucket_of(url: str) -> tuple[str, str]:
    """Return bucket and prefix, "" for none, of `s3://BUCKET/PREFIX`. Raise ValueError for anything else."""
    found = _BUCKET.fullmatch(url)
    if found is None:
        raise ValueError(
            "s3://BUCKET/PREFIX, of letters, digits, `.`, `_` and `-`, as in s3://my-bucket/kvasir/batches"
        )
    return found[1], found[2].strip("/")
