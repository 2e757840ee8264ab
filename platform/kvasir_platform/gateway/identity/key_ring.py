"""The API keys in force: looked up for every request, and reloaded in the background."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping

from kvasir.core.errors import ConfigError
from kvasir_platform.gateway.identity.identities import Identity
from kvasir_platform.gateway.identity.keys import KeyText, key_id, parse_keys

_log = logging.getLogger(__name__)


class KeyRing:
    """Keys of the texts that `read` returns, for these tenants.

    A lookup uses a digest keyed with a secret of this process, so that its timing reveals nothing about a
    stored hash. Raise ConfigError if the keys cannot be read at first.
    """

    def __init__(
        self,
        read: Callable[[], list[KeyText]],
        tenants: frozenset[str],
        secret: bytes | None = None,
    ) -> None:
        self._read = read
        self._tenants = tenants
        self._secret = os.urandom(32) if secret is None else secret
        self._trouble = ""
        texts = read()
        self._seen = self._mark(texts)
        self._keys = self._ring(texts)

    def digest(self, hashed: bytes) -> bytes:
        """Return the digest by which the key with this SHA-256 is found, which only this process can make."""
        return hashlib.blake2b(hashed, key=self._secret, digest_size=32).digest()

    def find(self, digest: bytes) -> Identity | None:
        """Return whose key has this digest, None if it is nobody's."""
        return self._keys.get(digest)

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

    def _ring(self, texts: list[KeyText]) -> Mapping[bytes, Identity]:
        keys = parse_keys(texts, self._tenants)
        return {
            self.digest(hashed): entry.identity._replace(key=key_id(hashed)) for hashed, entry in keys.items()
        }

    def _mark(self, texts: list[KeyText]) -> bytes:
        """A digest of these texts, independent of the times and sizes of their files."""
        mark = hashlib.blake2b(key=self._secret)
        for text in texts:
            mark.update(repr((text.tenant, text.text)).encode())
        return mark.digest()
