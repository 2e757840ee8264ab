"""Keys of leases, by which an agent knows a peer that was given a ticket.

An agent has a secret that only its own engine knows. A ticket holds a key that is derived from it for one
lease, so that its holder can read or confirm this lease and no other, as long as the lease lives. The agent
that checks a key is the one that issued it: no key is distributed, and none outlives the engine.

`register` returns the agent's endpoint sealed, with the secret behind it. `issue` replaces the secret by the
key of one lease; this is the form that leaves the engine. A text without a mark has no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
from collections.abc import Callable, Sequence

from kvasir.core.errors import TransferError

SECRET_BYTES = 32
KEY_BYTES = 32
MAC_BYTES = 32
LOG_EVERY_S = 10.0
_MARK, _BETWEEN = ".", ","
"""Neither is in the alphabet of packed endpoints."""

_log = logging.getLogger(__name__)


def make_secret() -> bytes:
    """Return a secret for one agent."""
    return os.urandom(SECRET_BYTES)


def seal(endpoint: str, secrets: Sequence[bytes]) -> str:
    """Return an endpoint with the secrets of its agents, one each, b"" for an agent without."""
    return endpoint + _MARK + _BETWEEN.join(secret.hex() for secret in secrets)


def issue(sealed: str, lease_id: str, fence: int) -> str:
    """Return the endpoint for the ticket of one lease. Raise TransferError for a malformed text."""
    endpoint, secrets = opened(sealed)
    if not secrets:
        return sealed
    return seal(endpoint, [lease_key(secret, lease_id, fence) if secret else b"" for secret in secrets])


def opened(text: str) -> tuple[str, tuple[bytes, ...]]:
    """Return an endpoint, and the secrets or keys behind it. Raise TransferError for a malformed text."""
    endpoint, mark, found = text.partition(_MARK)
    if not mark:
        return endpoint, ()
    try:
        keys = tuple(bytes.fromhex(each) for each in found.split(_BETWEEN))
    except ValueError as error:
        raise TransferError("the keys of an endpoint are malformed") from error
    if any(len(key) not in {0, KEY_BYTES} for key in keys):
        raise TransferError("a key of an endpoint has an invalid length")
    return endpoint, keys


def opened_one(text: str) -> tuple[str, bytes]:
    """The same of an endpoint of one agent, which has a key."""
    endpoint, keys = opened(text)
    if len(keys) != 1 or not keys[0]:
        raise TransferError("the endpoint has no key for its lease")
    return endpoint, keys[0]


def lease_key(secret: bytes, lease_id: str, fence: int) -> bytes:
    """Return the key of a lease."""
    return mac(secret, b"kvasir lease", fence.to_bytes(8, "little"), lease_id.encode())


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return a code that only a holder of the key can compute; each part counts with its length."""
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(key, framed, hashlib.sha256)


def same(mine: bytes, theirs: bytes) -> bool:
    """Compare two codes in constant time."""
    return hmac.compare_digest(mine, theirs)


class Refusals:
    """Peers that an agent refused because they had no valid ticket: counted, and logged at most once in
    LOG_EVERY_S. Thread-safe. `now` reads a clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._untaken = 0
        self._unlogged = 0
        self._next_line_s = float("-inf")

    def add(self, detail: str) -> None:
        """Count a refused peer."""
        with self._lock:
            self._untaken += 1
            self._unlogged += 1
            if self._now() < self._next_line_s:
                return
            self._next_line_s = self._now() + LOG_EVERY_S
            count, self._unlogged = self._unlogged, 0
        _log.warning("refused %d peers without a valid ticket for KV; the last: %s", count, detail)

    def take(self) -> int:
        """Return how many were refused since the last call."""
        with self._lock:
            taken, self._untaken = self._untaken, 0
        return taken
