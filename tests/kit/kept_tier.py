"""A tier in a dictionary, for tests of the layers above tiers; a block's bytes follow from its key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvasir.core.kv import Medium, TierLoad
from kvasir.ports.tier import TierBlock, TierChange, TierRead, TierWrite

SIZE = 8


def content(key: bytes) -> bytes:
    return key[-SIZE:]


class KeptTier:
    """Holds the blocks `kept`. Writes must have the content that follows from the key."""

    def __init__(self, medium: Medium, kept: Iterable[TierBlock] = ()) -> None:
        self.medium = medium
        self.kept = {each.key: each for each in kept}

    def lookup(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.kept), len(keys))

    def get(self, wanted: Sequence[TierRead]) -> int:
        for read in wanted:
            read.target[:] = content(read.key)
        return len(wanted)

    def put(self, blocks: Sequence[TierWrite]) -> TierChange:
        for write in blocks:
            assert bytes(write.data) == content(write.block.key)
            self.kept[write.block.key] = write.block
        return TierChange(stored=tuple(write.block for write in blocks))

    def drop(self, keys: Sequence[bytes]) -> TierChange:
        return TierChange()

    def maintain(self) -> TierChange:
        return TierChange()

    @property
    def maintenance_pending(self) -> bool:
        return False

    def held(self) -> Iterable[TierBlock]:
        return tuple(self.kept.values())

    def load(self) -> TierLoad:
        return TierLoad(self.medium)

    def close(self) -> None:
        """Nothing to free."""
