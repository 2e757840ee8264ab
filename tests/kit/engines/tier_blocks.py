"""Blocks whose bytes follow from their number, and helpers for tests of failing tiers of any kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import pytest

from kvasir.core.identity import KvLayout
from kvasir.ports.tier import KEY_BYTES, KvTier, TierBlock, TierChange, TierRead, TierWrite
from kvasir_workers.tiers import blob
from kvasir_workers.tiers.blob import HEADER_BYTES, fingerprint, make_header
from kvasir_workers.tiers.breaker import BreakerLimits

SIZE = 64 << 10
FOOTPRINT = 72 << 10
PATIENCE_S = 30.0
LAYOUT = KvLayout(16, "float32", "HND", 2, 2, 32, SIZE)
PRINT = fingerprint("model", "one", LAYOUT)
OTHER = fingerprint("model", "two", LAYOUT)
LIMITS = BreakerLimits(backoff_s=0.05, backoff_max_s=0.2)


def block(number: int) -> TierBlock:
    return TierBlock(number.to_bytes(2, "little") * (KEY_BYTES // 2), number + 1, number)


def content(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def put(tier: KvTier, *numbers: int) -> TierChange:
    return tier.put([TierWrite(block(n), memoryview(content(n))) for n in numbers])


def get(tier: KvTier, *numbers: int) -> int:
    """Return how many blocks were read; their bytes are always those that were stored."""
    targets = [bytearray(SIZE) for _ in numbers]
    found = tier.get([TierRead(block(n).key, memoryview(t)) for n, t in zip(numbers, targets, strict=True)])
    assert [bytes(target) for target in targets[:found]] == [content(n) for n in numbers[:found]]
    return found


def lookup(tier: KvTier, *numbers: int) -> int:
    return tier.lookup([block(number).key for number in numbers])


def tend_until(tier: KvTier, condition: Callable[[], bool]) -> TierChange:
    """Run the tier's maintenance; return the changes that it reports."""
    deadline = time.monotonic() + PATIENCE_S
    stored: list[TierBlock] = []
    removed: list[TierBlock] = []
    while True:
        change = tier.maintain()
        stored += change.stored
        removed += change.removed
        if condition() and change == TierChange() and not tier.maintenance_pending:
            return TierChange(tuple(stored), tuple(removed))
        assert time.monotonic() < deadline, tier.load()


def recover(tier: KvTier) -> TierChange:
    return tend_until(tier, lambda: tier.load().trouble == "")


def asked_in_vain(tier: KvTier) -> int:
    """Return how many of very many calls fail before the tier is not used any more."""
    before = tier.load().failures
    for _ in range(100):
        assert lookup(tier, 1) == get(tier, 1) == 0
        assert put(tier, 50).stored == ()
    assert tier.load().trouble
    return tier.load().failures - before


class Lines:
    """Log records of the tiers."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def take(self) -> list[str]:
        found = [
            record.getMessage()
            for record in self._caplog.records
            if record.name.startswith("kvasir_workers.tiers")
        ]
        self._caplog.clear()
        return found


def sound(number: int, mark: bytes = PRINT, key: int | None = None) -> bytes:
    """A stored blob of a block's bytes."""
    kept = block(number) if key is None else TierBlock(block(key).key, number + 1, number)
    return make_header(mark, kept, memoryview(content(number))) + content(number)


def flipped(at: int) -> bytes:
    raw = bytearray(sound(2))
    raw[at] ^= 16
    return bytes(raw)


WRONG_BLOBS = {
    "empty": ("truncated", b""),
    "garbage": ("magic", Random(1).randbytes(len(sound(2)))),
    "cut in its header": ("truncated", sound(2)[:50]),
    "cut in its bytes": ("truncated", sound(2)[:-1]),
    "too long": ("length", sound(2) + b"x"),
    "a bit of its header flipped": ("checksum", flipped(HEADER_BYTES - 20)),
    "its first bit flipped": ("magic", flipped(0)),
    "a bit of its bytes flipped": ("checksum", flipped(HEADER_BYTES + SIZE // 2)),
    "an old version's": ("version", sound(2)[:8] + bytes([blob.VERSION - 1, 0]) + sound(2)[10:]),
    "another model's": ("fingerprint", sound(2, OTHER)),
    "another key's": ("key", sound(3)),
}
