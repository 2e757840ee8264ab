"""The Python twin of the native module: the same results, for machines without a compiler and as the
reference in differential tests. It prefers simplicity over speed; see `_native.pyi` for the contract."""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvasir.core.kv import MEDIA, KvEventKind, Medium
from kvasir.native.stats import TreeStats

if TYPE_CHECKING:
    from typing_extensions import Buffer

SLOTS = MEDIA + 1
PREDICTED = MEDIA
_MAX_GROUPS = 8191
_M64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_HEADER = struct.Struct("<BBHI")


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & _M64) ^ (product >> 64)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _view(buffer: Buffer, width: int, what: str) -> memoryview:
    view = memoryview(buffer)
    if view.ndim != 1 or not view.contiguous or (view.itemsize != width and view.format != "B"):
        raise ValueError(f"{what} must be one contiguous buffer of {width}-byte items")
    if view.nbytes % width:
        raise ValueError(f"{what} must be a multiple of {width} bytes")
    return view.cast("B")


def _names(buffer: Buffer) -> array[int]:
    names = array("Q")
    names.frombytes(_view(buffer, 8, "names"))
    return names


def chain_hashes(tokens: Buffer, block_size: int, root: int) -> array[int]:
    """See `_native.pyi`.

    A block's digest is the sum, modulo 2**64, of folded products of its 8-byte words, each blended with a
    constant of its position (the last word is padded with zeros): independent of the parent, so that
    blocks are digested side by side. The chain is SplitMix64's finalizer (Steele, Lea and Flood, 2014)
    over parent xor digest. Folding as in wyhash (Wang Yi, 2019).
    """
    if block_size < 1:
        raise ValueError("block_size must be at least 1")
    data = _view(tokens, 4, "tokens")
    width = block_size * 4
    words = (width + 7) // 8
    pairs = (words + 1) // 2
    chain = array("Q")
    parent = root
    for start in range(0, len(data) - width + 1, width):
        block = bytes(data[start : start + width]).ljust(pairs * 16, b"\0")
        digest = block_size
        for pair in range(pairs):
            low, high = struct.unpack_from("<QQ", block, pair * 16)
            a = (low ^ ((2 * pair + 1) * _GOLDEN)) & _M64
            b = (high ^ ((2 * pair + 2) * _GOLDEN)) & _M64
            digest = (digest + _fold(a, b)) & _M64
        parent = _mix(parent ^ digest)
        chain.append(parent)
    return chain


class Record(NamedTuple):
    """One record of a log; `parent` is 0 except for STORED."""

    kind: KvEventKind
    medium: int
    rank: int
    parent: int
    names: array[int]


def records(log: bytes) -> Iterator[Record]:
    """Iterate over the records of a log. Raise ValueError if it is malformed."""
    view, at = memoryview(log), 0
    while at < len(view):
        if len(view) - at < _HEADER.size:
            raise ValueError(f"log: half a record at byte {at}")
        kind, medium, rank, count = _HEADER.unpack_from(view, at)
        at += _HEADER.size
        if kind not in (KvEventKind.STORED, KvEventKind.REMOVED, KvEventKind.CLEARED) or medium >= MEDIA:
            raise ValueError(f"log: kind {kind}, medium {medium} at byte {at - _HEADER.size}")
        stored = kind == KvEventKind.STORED
        size = 8 * (count + stored)
        if (kind == KvEventKind.CLEARED and count) or len(view) - at < size:
            raise ValueError(f"log: {count} names do not fit at byte {at}")
        names = array("Q", view[at : at + size].tobytes())
        yield Record(KvEventKind(kind), medium, rank, names.pop(0) if stored else 0, names)
        at += size


def record(kind: KvEventKind, medium: int, rank: int, parent: int, names: array[int]) -> bytes:
    """Encode one record of a log."""
    head = _HEADER.pack(kind, medium, rank, len(names))
    return head + (struct.pack("<Q", parent) if kind == KvEventKind.STORED else b"") + names.tobytes()


class _Group:
    def __init__(self) -> None:
        # Name -> parent, in the order of storing, for each medium.
        self.reported: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(MEDIA)]
        # Name -> (time, prediction).
        self.predicted: dict[int, tuple[float, int]] = {}

    def size(self) -> int:
        return sum(map(len, self.reported)) + len(self.predicted)


class PrefixTree:
    """See `_native.pyi`. Not a tree but sets of names per owner, as a reference for the tree."""

    def __init__(self, capacity: int, predicted_capacity: int) -> None:
        self._capacity = capacity
        self._predicted_capacity = predicted_capacity
        self._groups: dict[int, _Group] = {}
        self._dropped: dict[int, int] = {}
        self._ages: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._predictions = 0
        self._expired = 0
        self._evicted = 0

    def add_group(self) -> int:
        number = next(
            (n for n in range(_MAX_GROUPS) if n not in self._groups and n not in self._dropped), None
        )
        if number is None:
            raise OverflowError(f"{_MAX_GROUPS} groups exist, the most there can be")
        self._groups[number] = _Group()
        return number

    def drop_group(self, group: int) -> None:
        dropped = self._groups.pop(group)
        for name in dropped.predicted:
            del self._ages[group, name]
        if dropped.size():
            self._dropped[group] = dropped.size()

    def sweep(self, budget: int) -> int:
        for group in list(self._dropped):
            swept = min(budget, self._dropped[group])
            budget -= swept
            self._dropped[group] -= swept
            if not self._dropped[group]:
                del self._dropped[group]
        return sum(self._dropped.values())

    def apply(self, groups: Sequence[int], log: bytes) -> int:
        parsed = list(records(log))
        for each in parsed:
            if each.rank >= len(groups) or groups[each.rank] not in self._groups:
                raise KeyError(f"rank {each.rank}")
        return sum(
            self._apply(self._groups[groups[each.rank]].reported[each.medium], each) for each in parsed
        )

    def _apply(self, held: OrderedDict[int, int], change: Record) -> int:
        before = len(held)
        match change.kind:
            case KvEventKind.STORED:
                parent = change.parent
                for name in change.names:
                    if name not in held:
                        if self._blocks() >= self._capacity:
                            raise OverflowError(f"the tree holds {self._capacity} blocks, its capacity")
                        held[name] = parent
                    parent = name
                return len(held) - before
            case KvEventKind.REMOVED:
                for name in change.names:
                    held.pop(name, None)
            case KvEventKind.CLEARED:
                held.clear()
        return before - len(held)

    def predict(self, group: int, names: Buffer, now: float) -> int:
        predicted = self._groups[group].predicted
        self._predictions += 1
        kept = _names(names)[: self._predicted_capacity]
        for name in reversed(kept):
            predicted[name] = (now, self._predictions)
            self._ages.pop((group, name), None)
            self._ages[group, name] = None
        while len(self._ages) > self._predicted_capacity or (self._ages and self._blocks() > self._capacity):
            self._forget_oldest()
            self._evicted += 1
        return self._predictions

    def settle(self, group: int, names: Buffer, prediction: int) -> int:
        known = self._groups.get(group)
        if known is None:
            return 0
        mine = [name for name in _names(names) if known.predicted.get(name, (0.0, 0))[1] == prediction]
        for name in mine:
            del known.predicted[name]
            del self._ages[group, name]
        return len(mine)

    def expire(self, before: float) -> int:
        gone = 0
        while self._ages and self._time_of_oldest() < before:
            self._forget_oldest()
            gone += 1
        self._expired += gone
        return gone

    def match(self, names: Buffer, depths: Buffer) -> int:
        out = memoryview(depths).cast("B").cast("I")
        highest = max(self._groups, default=-1)
        if len(out) < 4 * (highest + 1):
            raise ValueError(f"depths needs room for {highest + 1} groups")
        for i in range(len(out)):
            out[i] = 0
        chain = _names(names)
        for number, group in self._groups.items():
            for medium in range(MEDIA):
                held = {name for owner in group.reported[: medium + 1] for name in owner}
                held |= set(group.predicted)
                depth = 0
                while depth < len(chain) and chain[depth] in held:
                    depth += 1
                out[4 * number + medium] = depth
        return max(out, default=0)

    def held(self, group: int, slot: int) -> int:
        known = self._groups[group]
        return len(known.predicted) if slot == PREDICTED else len(known.reported[slot])

    def export(self, group: int, rank: int, cursor: int, limit: int) -> tuple[bytes, int]:
        # Cursors count media. A medium is never split here, which is allowed because `limit` is approximate.
        held = self._groups[group].reported[cursor]
        log = bytearray()
        run: array[int] = array("Q")
        first = 0
        for name, parent in held.items():
            if run and parent != run[-1]:
                log += record(KvEventKind.STORED, cursor, rank, first, run)
                run = array("Q")
            if not run:
                first = parent
            run.append(name)
        if run:
            log += record(KvEventKind.STORED, cursor, rank, first, run)
        return bytes(log), cursor + 1 if cursor + 1 < MEDIA else -1

    def stats(self) -> TreeStats:
        names = {name for group in self._groups.values() for held in group.reported for name in held}
        names |= {name for group in self._groups.values() for name in group.predicted}
        return TreeStats(
            blocks=self._blocks(),
            predicted_blocks=len(self._ages),
            names=len(names),
            nodes=len(names),
            groups=len(self._groups),
            unswept=sum(self._dropped.values()),
            expired=self._expired,
            evicted=self._evicted,
            bytes=0,
        )

    def check_integrity(self) -> None:
        ages = {(number, name) for number, group in self._groups.items() for name in group.predicted}
        if ages != set(self._ages):
            raise AssertionError("predictions and their ages differ")
        if self._blocks() > self._capacity or len(self._ages) > self._predicted_capacity:
            raise AssertionError("a capacity is exceeded")

    def _blocks(self) -> int:
        return sum(group.size() for group in self._groups.values())

    def _time_of_oldest(self) -> float:
        group, name = next(iter(self._ages))
        return self._groups[group].predicted[name][0]

    def _forget_oldest(self) -> None:
        (group, name), _ = self._ages.popitem(last=False)
        del self._groups[group].predicted[name]


_MEDIUM_OF = {None: Medium.DEVICE, "GPU": Medium.DEVICE, "CPU": Medium.CPU, "STORAGE": Medium.DISK}


def _key(external: bytes | int) -> int:
    return external & _M64 if isinstance(external, int) else int.from_bytes(external[-8:], "big")


class _Event(NamedTuple):
    """The fields of one of vLLM's events that are used here."""

    kind: str
    medium: int
    keys: array[int]
    tokens: array[int]
    block_size: int
    parent: int | None
    salt: str
    adapter: str
    other_group: bool
    changes: list[Record]

    @classmethod
    def read(cls, fields: dict[str, Any]) -> _Event:
        kind = fields["type"]
        if kind not in ("BlockStored", "BlockRemoved", "AllBlocksCleared", "KvasirTierChanged"):
            raise ValueError(f"unknown type {kind!r}")
        parent = fields.get("parent_block_hash")
        adapter = fields.get("lora_name") or ""
        # One entry per block; the strings of the first are the adapter's name, if any, and the salt.
        extras = [each for each in ((fields.get("extra_keys") or [None])[0] or ()) if isinstance(each, str)]
        if adapter and extras and extras[0] == adapter:
            del extras[0]
        tokens = fields.get("token_ids", ())
        if not all(type(each) is int for each in tokens):
            raise ValueError("a token id that is no integer")
        return cls(
            kind=kind,
            medium=_MEDIUM_OF.get(fields.get("medium"), Medium.REMOTE),
            keys=array("Q", map(_key, fields.get("block_hashes", ()))),
            tokens=array("I", tokens),
            block_size=fields.get("block_size", 0),
            parent=None if parent is None else _key(parent),
            salt=extras[-1] if extras else "",
            adapter=adapter,
            other_group=bool(fields.get("group_idx")),
            changes=_tier_changes(fields.get("log")) if kind == "KvasirTierChanged" else [],
        )


def _tier_changes(log: Any) -> list[Record]:
    if not isinstance(log, bytes):
        raise ValueError("a tier's changes without a log")
    changes = list(records(log))
    if any(each.medium == Medium.DEVICE for each in changes):
        raise ValueError("a tier's changes are of media below the device")
    return changes


class Shadow:
    """See `_native.pyi`."""

    def __init__(self, ranks: int, root_of: Callable[[str, str], int]) -> None:
        self._root_of = root_of
        self._tree = PrefixTree(1 << 60, 0)
        self._groups = [self._tree.add_group() for _ in range(ranks)]
        # For each rank and medium: the engine's key -> [our name, copies].
        self._keys: list[list[dict[int, list[int]]]] = [[{} for _ in range(MEDIA)] for _ in range(ranks)]
        self._log = bytearray()
        self.unnamed = 0

    def store(  # noqa: PLR0917 - called for every event, where keywords would cost
        self,
        rank: int,
        medium: int,
        parent: int | None,
        keys: Buffer,
        tokens: Buffer,
        block_size: int,
        salt: str = "",
        adapter: str = "",
    ) -> int:
        named = _names(keys)
        if _view(tokens, 4, "tokens").nbytes != 4 * block_size * len(named):
            raise ValueError(f"{len(named)} keys of blocks of {block_size} tokens do not fit their tokens")
        above = self._root_of(salt, adapter) if parent is None else self._name(rank, parent)
        if above is None:
            self.unnamed += len(named)
            return 0
        chain = chain_hashes(tokens, block_size, above)
        held = self._keys[rank][medium]
        for key, name in zip(named, chain, strict=True):
            held.setdefault(key, [name, 0])[1] += 1
        self._record(record(KvEventKind.STORED, medium, rank, above, chain))
        return len(named)

    def _name(self, rank: int, key: int) -> int | None:
        return next((held[key][0] for held in self._keys[rank] if key in held), None)

    def remove(self, rank: int, medium: int, keys: Buffer) -> int:
        held = self._keys[rank][medium]
        known, gone = 0, array("Q")
        for key in _names(keys):
            if key not in held:
                continue
            known += 1
            held[key][1] -= 1
            if not held[key][1]:
                gone.append(held.pop(key)[0])
        if gone:
            self._record(record(KvEventKind.REMOVED, medium, rank, 0, gone))
        return known

    def clear(self, rank: int, medium: int) -> None:
        self._keys[rank][medium].clear()
        if self._tree.held(self._groups[rank], medium):
            self._record(record(KvEventKind.CLEARED, medium, rank, 0, array("Q")))

    def ingest(self, rank: int, payload: bytes) -> int:
        try:
            _, events, *_ = msgspec.msgpack.decode(payload, type=list[Any])
            parsed = [_Event.read(fields) for fields in events]
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"event: {error}") from error
        for event in parsed:
            if event.other_group:
                continue
            if event.kind == "AllBlocksCleared":
                self.clear(rank, Medium.DEVICE)
            elif event.kind == "KvasirTierChanged":
                self._follow_tier(rank, event.changes)
            elif event.kind == "BlockRemoved":
                self.remove(rank, event.medium, event.keys)
            elif not event.block_size or len(event.tokens) != event.block_size * len(event.keys):
                self.unnamed += len(event.keys)
            else:
                self.store(
                    rank,
                    event.medium,
                    event.parent,
                    event.keys,
                    event.tokens,
                    event.block_size,
                    event.salt,
                    event.adapter,
                )
        return len(parsed)

    def _follow_tier(self, rank: int, changes: list[Record]) -> None:
        for each in changes:
            if each.kind == KvEventKind.CLEARED:
                self.clear(rank, each.medium)
            else:
                self._record(record(each.kind, each.medium, rank, each.parent, each.names))

    def _record(self, log: bytes) -> None:
        if self._tree.apply(self._groups, log):
            self._log += log

    def take_log(self) -> bytes:
        log, self._log = bytes(self._log), bytearray()
        return log

    def export(self, rank: int, cursor: int, limit: int) -> tuple[bytes, int]:
        return self._tree.export(self._groups[rank], rank, cursor, limit)

    def held(self, rank: int, medium: int) -> int:
        return self._tree.held(self._groups[rank], medium)
