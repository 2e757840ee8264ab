"""Where files and batches are kept, and who works on a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class ObjectStorage(Protocol):
    """Objects by key: names of letters, digits, `.`, `_` and `-`, joined by `/`.

    Obligations: an object is there as a whole or not at all, and survives a crash of the machine once `put`
    has returned. Every method may block, be called from several threads, and raise CapacityError
    (`storage_unavailable`).
    """

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        """Store an object, in place of an earlier one of the key."""
        ...

    def get(self, key: str) -> bytes | None:
        """Return an object, None if there is none."""
        ...

    def remove(self, key: str) -> None:
        """Remove an object. Idempotent."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the last parts of the keys directly below a folder, in order."""
        ...


class WorkLease(Protocol):
    """Which process works on a named piece of work. Methods block, and raise as those of ObjectStorage.

    Obligations: while one process holds the lease of a name, no other gets it; a holder that has ended, or
    does not keep its lease, loses it within seconds.
    """

    def take(self, name: str) -> int | None:
        """Take the lease of a name. Return its fencing token, larger than any before it; None if another
        process holds the lease."""
        ...

    def keep(self, name: str) -> bool:
        """Prolong a lease. Return False if it is lost: the holder must stop."""
        ...

    def release(self, name: str, *, done: bool) -> None:
        """Give a lease back. `done`: nobody will ask for this name again."""
        ...
