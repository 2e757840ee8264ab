"""Remote stores that several workers read and write: what any of them reports there is usable by all.

A worker's reports of such a store are kept in groups of their own, beside what it holds itself, and lookups
form the union. Each worker's view stays exact, by the same batches and snapshots as everything else; a block
is in the store until the last worker that reported it reports its removal.

A store outlives its writers. The reports of a worker that leaves stay for `keep_s`, the store's own time to
live, since nobody looks for blocks that are not known to be there. The worker cannot correct them any more:
another member that finds a block missing removes it. They are evicted first when the index is full.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.core.kv import MEDIA, KvEventKind, Medium
from kvasir_router.index.places import Places, RankGroups

_HEADER = struct.Struct("<BBHI")
_NAME_BYTES = 8
_MOST_TURNS = 32
"""How often a prefix may alternate between a worker's own blocks and the store's. Beyond that it is taken to
end, which can only underestimate it."""
_MOST_KEPT = 16
"""Number of departed workers whose reports are kept, per store."""


class SplitLog(NamedTuple):
    """A log split by destination. `missing` has those records of `remote` that remove blocks."""

    own: bytes
    remote: bytes
    missing: bytes


def split_log(log: bytes) -> SplitLog:
    """Split a log into records of the remote medium and others. Raises ValueError for a malformed log."""
    own, remote, missing = bytearray(), bytearray(), bytearray()
    start = at = 0
    taken = Medium.DEVICE
    while at < len(log):
        if len(log) - at < _HEADER.size:
            raise ValueError(f"log: half a record at byte {at}")
        kind, medium, _, count = _HEADER.unpack_from(log, at)
        if (medium == Medium.REMOTE) != (taken == Medium.REMOTE):
            (remote if taken == Medium.REMOTE else own).extend(memoryview(log)[start:at])
            start, taken = at, medium
        end = at + _HEADER.size + _NAME_BYTES * (count + (kind == KvEventKind.STORED))
        if end > len(log):
            raise ValueError(f"log: {count} names do not fit at byte {at + _HEADER.size}")
        if medium == Medium.REMOTE and kind == KvEventKind.REMOVED:
            missing += memoryview(log)[at:end]
        at = end
    if not start and taken != Medium.REMOTE:
        return SplitLog(log, b"", b"")
    (remote if taken == Medium.REMOTE else own).extend(memoryview(log)[start:])
    return SplitLog(bytes(own), bytes(remote), bytes(missing))


@dataclass(frozen=True, slots=True)
class _Kept:
    """The reports of a worker that left."""

    until_s: float
    worker_id: str
    epoch: int
    groups: tuple[int, ...]


def _no_cells() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Store:
    """One store: its members' groups by worker, and the kept ones. For lookups, `own` has how far each member
    gets without a remote store, and `reports` how far each reporter gets in the store."""

    members: dict[str, RankGroups] = field(default_factory=dict)
    kept: deque[_Kept] = field(default_factory=deque)
    own: NDArray[np.int64] = field(default_factory=_no_cells)
    reports: NDArray[np.int64] = field(default_factory=_no_cells)

    def renew(self, nowhere: int) -> None:
        """Recompute the arrays after groups changed."""
        own = [group for held in self.members.values() for group in held.own if group != nowhere]
        groups = [group for held in self.members.values() for group in held.remote]
        groups += [group for kept in self.kept for group in kept.groups]
        self.own = np.array(own, dtype=np.int64) * MEDIA + Medium.DISK
        self.reports = np.array(groups, dtype=np.int64) * MEDIA + Medium.REMOTE


class SharedTiers:
    """All stores, by the name in their members' identities."""

    def __init__(self, places: Places, *, keep_s: float) -> None:
        self._places = places
        self._keep_s = keep_s
        self._stores: dict[str, _Store] = {}

    def __bool__(self) -> bool:
        return bool(self._stores)

    # -- members ---------------------------------------------------------------------------------

    def join(self, name: str, worker_id: str, epoch: int) -> None:
        """A worker's session begins. One that resumes the same instance repeats its reports."""
        store = self._stores.setdefault(name, _Store())
        again = [each for each in store.kept if (each.worker_id, each.epoch) == (worker_id, epoch)]
        for each in again:
            store.kept.remove(each)
            self._places.close(each.groups)
        store.members[worker_id] = RankGroups((), ())
        store.renew(self._places.nowhere)

    def moved(self, name: str, worker_id: str, held: RankGroups) -> None:
        """Replace a member's groups."""
        store = self._stores[name]
        store.members[worker_id] = held
        store.renew(self._places.nowhere)

    def leave(self, name: str, worker_id: str, epoch: int, reports: tuple[int, ...], now: float) -> None:
        """A member's session ended; `reports` are its groups of this store, whose ownership moves to the
        store."""
        store = self._stores[name]
        del store.members[worker_id]
        if reports:
            store.kept.append(_Kept(now + self._keep_s, worker_id, epoch, reports))
        if len(store.kept) > _MOST_KEPT:
            self._places.close(store.kept.popleft().groups)
        self._tidy(name, store)

    def missing(self, name: str, log: bytes, ranks: int) -> None:
        """A member reported blocks as missing: remove them from the reports of departed workers too."""
        for kept in self._stores[name].kept:
            for group in kept.groups:
                self._places.tree.apply((group,) * ranks, log)

    def make_room(self) -> bool:
        """Drop the oldest kept reports. Return whether there were any."""
        kept = [(store.kept[0].until_s, name) for name, store in self._stores.items() if store.kept]
        if kept:
            name = min(kept)[1]
            self._drop_oldest(name, self._stores[name])
        return bool(kept)

    # -- time ------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Drop kept reports that expired."""
        for name, store in list(self._stores.items()):
            while store.kept and store.kept[0].until_s <= now:
                self._drop_oldest(name, store)

    def next_due(self) -> float | None:
        """Return when `expire` is due."""
        return min((store.kept[0].until_s for store in self._stores.values() if store.kept), default=None)

    # -- lookups ---------------------------------------------------------------------------------

    def extend(self, names: array[int], depths: NDArray[np.uint32]) -> None:
        """Write to the remote column of each member's row how far it gets with all that its store holds."""
        for store in self._stores.values():
            if len(store.own) and len(store.reports):
                self._extend(store, names, depths)

    def _extend(self, store: _Store, names: array[int], depths: NDArray[np.uint32]) -> None:
        cells: NDArray[np.uint32] = depths.ravel()
        reach: NDArray[np.uint32] = cells.take(store.own)
        np.maximum(reach, cells.take(store.reports).max(), out=reach)
        at = int(reach.min())
        for _ in range(_MOST_TURNS):
            if at == len(names):
                break
            found = self._places.match_from(names, at).ravel()
            further = found.take(store.own)
            # At most the longest part that a single member reported.
            np.maximum(further, found.take(store.reports).max(), out=further)
            further *= reach == at
            reach += further
            ahead = reach[reach > at]
            if not len(ahead):
                break
            at = int(ahead.min())
        cells[store.own + (Medium.REMOTE - Medium.DISK)] = reach

    # -- views -----------------------------------------------------------------------------------

    @property
    def kept_groups(self) -> tuple[int, ...]:
        """All groups that belong to no session."""
        return tuple(group for store in self._stores.values() for kept in store.kept for group in kept.groups)

    # -- internals -------------------------------------------------------------------------------

    def _drop_oldest(self, name: str, store: _Store) -> None:
        self._places.close(store.kept.popleft().groups)
        self._tidy(name, store)

    def _tidy(self, name: str, store: _Store) -> None:
        store.renew(self._places.nowhere)
        if not store.members and not store.kept:
            del self._stores[name]
