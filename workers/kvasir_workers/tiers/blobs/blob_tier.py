"""The common part of the disk and Redis tiers: blobs of one kind, the health of the medium, and the ledger of
blocks known to be there.

Each tier implements lookup, read and write; verification and reporting are the same for both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random

from kvasir.core.kv import Medium, TierLoad
from kvasir.ports.clock import Rng
from kvasir.ports.tier import TierBlock, TierWrite
from kvasir_workers.tiers.blob import HEADER_BYTES, make_header, verify
from kvasir_workers.tiers.breaker import BreakerLimits
from kvasir_workers.tiers.health import TierCounters, TierHealth
from kvasir_workers.tiers.ledger import BlockLedger

_log = logging.getLogger(__name__)


class BlobTier:
    """The part of a `kvasir.ports.tier.KvTier` that does not depend on the medium.

    `what` names the tier in the log. `block_bytes` is a multiple of blob.LANE_BYTES, `fingerprint` is from
    blob.fingerprint. A block takes `footprint` bytes of `capacity`, which is 0 if the tier does not limit it;
    the ledger has at most `most_blocks` blocks. `_reads` is the health of reads, `_writes` of writes.
    """

    def __init__(
        self,
        medium: Medium,
        what: str,
        fingerprint: bytes,
        block_bytes: int,
        *,
        footprint: int,
        capacity: int,
        most_blocks: int,
        now: Callable[[], float],
        rng: Rng | None,
        limits: BreakerLimits | None,
    ) -> None:
        self._what = what
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._blob_bytes = HEADER_BYTES + block_bytes
        self._footprint = footprint
        self._now = now
        rng = rng or Random()  # noqa: S311 - spreads trials, guards nothing
        self._reads = TierHealth(what, now, rng, limits)
        self._writes = TierHealth(f"{what}, for writing,", now, rng, limits)
        self._tally = TierCounters(medium, block_bytes, capacity)
        self._reasons: set[str] = set()
        self._held = BlockLedger(most_blocks)
        self._closed = False

    @property
    def medium(self) -> Medium:
        """See KvTier."""
        return self._tally.load.medium

    def held(self) -> Iterable[TierBlock]:
        """See KvTier."""
        return self._held.blocks()

    def load(self) -> TierLoad:
        """See KvTier."""
        blocks = len(self._held)
        return replace(
            self._tally.load,
            blocks=blocks,
            bytes_used=blocks * self._footprint,
            trouble=self._reads.trouble or self._writes.trouble,
            readable=self._reads.usable,
        )

    def _header(self, write: TierWrite) -> bytes:
        return make_header(self._fingerprint, write.block, write.data)

    def _judge(self, key: bytes, header: bytes, size: int) -> str | None:
        """Return why a blob of `size` bytes with this header is invalid, or None."""
        return verify(header, size, key, self._fingerprint, self._block_bytes)

    def _refuse(self, reason: str, where: str) -> None:
        """Count an invalid blob, which is deleted at `where`. Each reason, from `blob.verify` or the tier's
        own, is logged once."""
        self._tally.add(corrupt_blocks=1)
        if reason not in self._reasons:
            self._reasons.add(reason)
            _log.warning(
                "%s: deleted %s, which is not the block it should be (%s); its prompt is computed again. "
                "Further ones are only counted: many of them mean a failing medium or another writer",
                self._what,
                where,
                reason,
            )

    def _count_dropped(self, blocks: Sequence[TierWrite]) -> None:
        """Count the blocks to be stored that were not."""
        dropped = sum(write.block.key not in self._held for write in blocks)
        if dropped:
            self._tally.add(dropped_blocks=dropped)
