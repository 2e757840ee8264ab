"""Salts of KV caches: they prevent a tenant from detecting another tenant's prompts by response times.

An engine shares the KV of equal prompts, and a cached prompt is answered sooner. So the block chain of each
prompt begins with a salt; blocks under different salts are different blocks in the engine, in its tiers and
in the router's index. The salt is an HMAC-SHA256 over the caller's scope and the client's own salt, keyed by
a secret of the deployment: a tenant cannot produce another's salt, and a salt reveals neither the tenant nor
the client's salt to whoever sees it (a worker, a block store).

Tenants of a group share whole prompts, by configuration. Tenants of a declared prefix share the blocks of
that prefix only (`shared_prefixes`): their salts begin in the block after it. A salt derived from the system
prompt would not do: it would let everyone who knows that prompt detect what other tenants wrote after it,
which is what salts prevent.
"""

from __future__ import annotations

import base64
import hmac
import logging
import os
import secrets
from pathlib import Path

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError
from kvasir.native.salt_places import salt_place

_log = logging.getLogger(__name__)

_SECRET_BYTES = 32
_MIN_CHARS = 32


class CacheScope:
    """The scope that shares a cache. `client` is the salt of a request, "" for none."""

    __slots__ = ("_key", "_plain")

    def __init__(self, secret: bytes, cache: str, tenant: str) -> None:
        # Names of tenants and groups contain no line break, so no two scopes have the same encoding.
        who = f"tenant\n{tenant}" if cache == "own" else cache.replace(":", "\n", 1)
        self._key = hmac.digest(secret, b"kvasir cache scope\n" + who.encode(), "sha256")
        self._plain = self._made(b"")

    def salt(self, client: str = "") -> str:
        """Return the salt of a request, 43 characters."""
        return self._made(client.encode()) if client else self._plain

    def _made(self, client: bytes) -> str:
        digest = hmac.digest(self._key, client, "sha256")
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class Open:
    """Salts of a deployment without API keys: only the request's own salt applies."""

    __slots__ = ()

    @staticmethod
    def salt(client: str = "") -> str:
        """Return the client's salt, which never is one with a place of its own."""
        return client if not client or salt_place(client) is None else " " + client


def salt_secret(deployment: Deployment) -> bytes:
    """Return the salts of a deployment. Raise ConfigError."""
    if not deployment.gateway.authenticates:
        return b""
    named = deployment.tenancy.cache_secret_file
    return cache_secret(None if named is None else Path(named))


def cache_secret(path: Path | None) -> bytes:
    """Return the deployment's secret from its file, or a random one for this run. Raise ConfigError for a
    file that cannot be read or is too short."""
    if path is None:
        _log.warning(
            "tenancy.cache_secret_file is not set: KV in tiers cannot be reused after a restart or by "
            "another router"
        )
        return secrets.token_bytes(_SECRET_BYTES)
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"tenancy.cache_secret_file {path}: {error.strerror}") from error
    if len(secret) < _MIN_CHARS:
        raise ConfigError(
            f"tenancy.cache_secret_file {path}: fewer than {_MIN_CHARS} characters; write a random secret "
            "into it, as `openssl rand -hex 32` makes one"
        )
    return secret


def keep_cache_secret(path: Path) -> None:
    """Create a secret in `path` with access for its owner only, unless the file exists. Raise ConfigError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(secrets.token_hex(_SECRET_BYTES))
