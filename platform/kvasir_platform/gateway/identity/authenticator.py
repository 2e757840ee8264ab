"""Maps the Authorization header of a request to an identity: an API key, or a token of a provider."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Protocol

from kvasir.core.errors import CapacityError
from kvasir.ports.clock import Clock
from kvasir_platform.gateway.identity.identities import Identity, unauthorized
from kvasir_platform.gateway.identity.key_ring import KeyRing
from kvasir_platform.gateway.identity.tokens import TokenIdentities

_REFRESH_S = 1.0
_TOKEN_DOTS = 2
"""Dots between the three parts of a signed JSON Web Token."""


class FollowedKeys(Protocol):
    """A source of keys that is followed in the background. `read`: whether it has been read once."""

    @property
    def read(self) -> bool: ...

    async def run(self) -> None: ...


class Authenticator:
    """API keys, and tokens if there are issuers. Both are found by the digest of KeyRing. `wall` is Unix
    time in seconds."""

    def __init__(
        self,
        keys: KeyRing,
        tokens: TokenIdentities | None,
        clock: Clock,
        wall: Callable[[], float],
        followed: FollowedKeys | None = None,
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self._clock = clock
        self._wall = wall
        self._followed = followed

    def identity(self, authorization: bytes | None) -> Identity:
        """Return whose request it is. Raise RequestError 401, RequestError 403 for a token of no tenant, or
        CapacityError while keys are being read, which is KeysPending for those of a token."""
        scheme, _, sent = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not sent:
            raise unauthorized("Send an API key as `Authorization: Bearer KEY`.", "invalid_api_key")
        key = sent.strip()
        digest = self._keys.digest(hashlib.sha256(key).digest())
        known = self._keys.find(digest)
        if known is not None:
            if known.expires_s <= self._wall():
                raise unauthorized("The API key has expired.", "api_key_expired")
            return known
        if self._tokens is not None and key.count(b".") == _TOKEN_DOTS:
            return self._tokens.identity(key, digest)
        if self._followed is not None and not self._followed.read:
            raise CapacityError("The API keys are being read. Try again.", code="api_keys_unavailable")
        raise unauthorized("The API key is invalid.", "invalid_api_key")

    async def run(self) -> None:
        """Reload keys, and keep the keys of issuers current, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reload(), name="API keys")
            if self._followed is not None:
                tasks.create_task(self._followed.run(), name="keys in Redis")
            if self._tokens is not None:
                tasks.create_task(self._tokens.run(), name="issuers of tokens")

    async def _reload(self) -> None:
        while True:
            await self._clock.sleep(_REFRESH_S)
            await asyncio.to_thread(self._keys.refresh)
