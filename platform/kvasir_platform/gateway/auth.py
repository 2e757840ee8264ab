"""Who may call: API keys, of which only hashes are stored, read again when their file changes."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from kvasir.core.errors import ConfigError, RequestError

_log = logging.getLogger(__name__)
_LINE = re.compile(r"[0-9a-fA-F]{64}")
_MAX_KEYS = 100_000
_RECHECK_S = 1.0


class ApiKeys:
    """The keys of one file: a SHA-256 in hex a line, `#` starts a comment.

    Look-ups are by a digest keyed with a secret of this process, so that their timing says nothing about
    a stored hash, however many keys there are. Raises ConfigError naming file and line.
    """

    def __init__(self, path: Path, now: Callable[[], float], secret: bytes | None = None) -> None:
        self._path = path
        self._now = now
        self._secret = os.urandom(32) if secret is None else secret
        self._stamp = self._read_stamp()
        self._keys = self._read()
        self._recheck_s = now() + _RECHECK_S

    def check(self, authorization: bytes | None) -> None:
        """Raise RequestError 401 unless the Authorization header carries a known key."""
        self._reload()
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise _unauthorized("Send an API key as `Authorization: Bearer KEY`.")
        if self._digest(hashlib.sha256(key.strip()).digest()) not in self._keys:
            raise _unauthorized("The API key is not known.")

    def _reload(self) -> None:
        now = self._now()
        if now < self._recheck_s:
            return
        self._recheck_s = now + _RECHECK_S
        try:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._keys = self._read()
                self._stamp = stamp
        except ConfigError as error:
            _log.error("the API keys stay as they were", extra={"reason": error.message})

    def _read_stamp(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise ConfigError(f"gateway.api_keys_file {self._path}: {error.strerror}") from error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> frozenset[bytes]:
        try:
            lines = self._path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"gateway.api_keys_file {self._path}: {error}") from error
        keys = set()
        for number, line in enumerate(lines, 1):
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            if not _LINE.fullmatch(entry):
                raise ConfigError(
                    f"{self._path}:{number}: expected the SHA-256 of a key, 64 hexadecimal digits"
                )
            keys.add(self._digest(bytes.fromhex(entry)))
        if len(keys) > _MAX_KEYS:
            raise ConfigError(f"{self._path}: more than {_MAX_KEYS} keys")
        return frozenset(keys)

    def _digest(self, hashed: bytes) -> bytes:
        return hashlib.blake2b(hashed, key=self._secret, digest_size=32).digest()


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, status=401, code="invalid_api_key")
