"""Salts of KV caches: what keeps one tenant from finding another's prompts by how fast they are answered.

An engine shares the KV of equal prompts, and a prompt that is found is answered sooner. So each prompt's
chain of blocks begins with a salt, and blocks under different salts are different blocks, in the engine, in
its tiers and in the router's index alike. The salt is an HMAC-SHA256 over who the caller is and the salt that
it chose itself, under a secret of the deployment: a tenant cannot name another's salt, whatever it sends, and
who sees a salt (a worker, a store of blocks) learns neither tenant nor the client's own salt.

What several tenants may share is said by groups, as a whole. Sharing no more than a leading system prompt is
not to be had exactly: vLLM puts the salt into the hash of a prompt's first block, from which all others
follow, so that blocks before a salt would have to be named by a rule of one's own in the engine. Nor is there
a way around it. A salt made from the system prompt alone would let everyone who knows that prompt find what
other tenants wrote after it, which is the very thing that salts prevent. Tenants of a group find each other's
whole prompts, and have asked for it.
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

_log = logging.getLogger(__name__)

_SECRET_BYTES = 32
_MIN_CHARS = 32


class CacheScope:
    """Those who share a cache. `client` is the salt that a request brings, "" for none."""

    __slots__ = ("_key", "_plain")

    def __init__(self, secret: bytes, cache: str, tenant: str) -> None:
        # Neither a tenant's name nor a group's has a line end, so no two scopes have one spelling.
        who = f"tenant\n{tenant}" if cache == "own" else cache.replace(":", "\n", 1)
        self._key = hmac.digest(secret, b"kvasir cache scope\n" + who.encode(), "sha256")
        self._plain = self._made(b"")

    def salt(self, client: str = "") -> str:
        """The salt of a request, 43 characters."""
        return self._made(client.encode()) if client else self._plain

    def _made(self, client: bytes) -> str:
        digest = hmac.digest(self._key, client, "sha256")
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class Open:
    """Where nobody is told apart: a request's own salt is all there is."""

    __slots__ = ()

    @staticmethod
    def salt(client: str = "") -> str:
        """As the client sent it."""
        return client


def salt_secret(deployment: Deployment) -> bytes:
    """What the salts of a deployment are made from; empty where nobody is told apart. Raises ConfigError."""
    if not deployment.gateway.asks_for_keys:
        return b""
    named = deployment.tenancy.cache_secret_file
    return cache_secret(None if named is None else Path(named))


def cache_secret(path: Path | None) -> bytes:
    """The deployment's secret from its file, or one for this run alone. Raises ConfigError for a file that
    cannot be read, or that holds too little to be one."""
    if path is None:
        _log.warning(
            "no tenancy.cache_secret_file: KV that tiers keep is not found again after a restart, nor by "
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
    """Make a secret in `path`, for its owner alone, unless there is one. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(secrets.token_hex(_SECRET_BYTES))
