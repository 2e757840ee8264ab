"""The API keys in force: looked up for every request, and reloaded in the background."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping

from kvasir.core.errors import ConfigError, RequestError
from kvasir_platform.gateway.tenants.keys import KeyEntry, KeyText, parse_keys

_log = logging.getLogger(__name__)


class KeyRing:
    """Keys of the texts that `read` returns, for these tenants.

    A lookup uses a digest keyed with a secret of this process, so that its timing reveals nothing about a
    stored hash. `wall` is Unix time in seconds. Raise ConfigError if the keys cannot be read at first.
    """

    def __init__(
        self,
        read: Callable[[], list[KeyText]],
        tenants: frozenset[str],
        wall: Callable[[], float],
        secret: bytes | None = None,
    ) -> None:
        self._read = read
        self._tenants = tenants
        self._wall = wall
        self._secret = os.urandom(32) if secret is None else secret
        self._trouble = ""
        texts = read()
        self._seen = self._mark(texts)
        self._keys = self._ring(texts)

    def tenant(self, authorization: bytes | None) -> str:
        """Return the tenant of the key in the Authorization header. Raise RequestError 401."""
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise _unauthorized("Send an API key as `Authorization: Bearer KEY`.")
        entry = self._keys.get(self._digest(hashlib.sha256(key.strip()).digest()))
        if entry is None:
            raise _unauthorized("The API key is invalid.")
        if entry.expires_s <= self._wall():
            raise _unauthorized("The API key has expired.", "api_key_expired")
        return entry.tenant

    def refresh(self) -> None:
        """Reload the keys and use them if they have changed; invalid keys are logged once and ignored. Blocks
        on files; may run in a thread during lookups."""
        try:
            texts = self._read()
            seen = self._mark(texts)
            if seen != self._seen:
                self._keys = self._ring(texts)
                self._seen = seen
                _log.info("API keys reloaded", extra={"keys": len(self._keys)})
        except ConfigError as error:
            if error.message != self._trouble:
                _log.error(
                    "invalid API keys ignored; the previous ones stay in use", extra={"reason": error.message}
                )
            self._trouble = error.message
        else:
            self._trouble = ""

    def _ring(self, texts: list[KeyText]) -> Mapping[bytes, KeyEntry]:
        keys = parse_keys(texts, self._tenants)
        return {self._digest(hashed): entry for hashed, entry in keys.items()}

    def _mark(self, texts: list[KeyText]) -> bytes:
        """A digest of these texts, independent of the times and sizes of their files."""
        mark = hashlib.blake2b(key=self._secret)
        for text in texts:
            mark.update(repr((text.tenant, text.text)).encode())
        return mark.digest()

    def _digest(self, hashed: bytes) -> bytes:
        return hashlib.blake2b(hashed, key=self._secret, digest_size=32).digest()


def _unauthorized(message: str, code: str = "invalid_api_key") -> RequestError:
    return RequestError(message, status=401, code=code)
