"""Reports of a worker's KV blocks: a log of changes, and snapshots to start from.

A worker numbers its batches of changes within one epoch. A reader has the worker's exact state as long as no
number is missing. After a gap, a restart or a late start, it loads a snapshot and applies the batches that
follow. As with the watch of etcd, an unavailable position is an error and never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from kvasir.core.values import value

LOG_ALIGNMENT = 8


class Medium(IntEnum):
    """Where the bytes of a block are, fastest first. The values are those of the log."""

    DEVICE = 0
    CPU = 1
    DISK = 2
    REMOTE = 3


MEDIA = len(Medium)


@dataclass(frozen=True, slots=True)
class TierLoad:
    """One KV tier of a worker. Counters only grow within one epoch.

    `loads` are batched reads, which took `load_s` seconds in total. `corrupt_blocks` failed verification,
    `dropped_blocks` were not written because the write queue was full, `failures` are calls that failed or
    timed out. `trouble` describes a current problem and its remedy, else "". A tier in trouble is still read
    if it is `readable`, for example a full disk.
    """

    medium: Medium
    blocks: int = 0
    bytes_used: int = 0
    bytes_capacity: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    stored_blocks: int = 0
    stored_bytes: int = 0
    evicted_blocks: int = 0
    corrupt_blocks: int = 0
    dropped_blocks: int = 0
    failures: int = 0
    trouble: str = ""
    readable: bool = True


class KvEventKind(IntEnum):
    """Kinds of records in a log.

    A record is, little-endian: u8 kind, u8 medium, u16 data-parallel rank, u32 count; a STORED record
    continues with the u64 name of the parent of its first block (0 or the root of the chain for none); STORED
    and REMOVED end with `count` u64 names. The blocks of a STORED record form one chain; those of a REMOVED
    record are in any order. CLEARED has count 0: the rank and medium hold no blocks.
    Storing a block that is held, or removing one that is not, has no effect.
    """

    STORED = 1
    REMOVED = 2
    CLEARED = 3


@value
class KvBatch:
    """The changes of one flush. `sequence` counts batches from 1 without gaps within `epoch`."""

    epoch: int
    sequence: int
    log: bytes


@dataclass(frozen=True, slots=True)
class KvSnapshotPart:
    """One part of a snapshot: STORED records.

    All parts carry the `epoch` and `sequence` at which the snapshot started. All parts plus every batch with
    a greater sequence, applied in order, give the worker's state: changes during the snapshot are in those
    batches. Without the part marked `last`, no part may be used.
    """

    epoch: int
    sequence: int
    log: bytes
    last: bool


class KvState(StrEnum):
    """How well the prefix index knows the cache of a worker.

    EXACT: all changes up to the newest batch are applied. CATCHING_UP: a snapshot is being loaded, and only
    predictions are used until then. PREDICTED: the worker sends no reports, or they are not used.
    """

    EXACT = "exact"
    CATCHING_UP = "catching_up"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class KvStatus:
    """The state of the prefix index for one worker. `since_s` is a reading of the router's clock. `blocks`
    counts reported blocks over all ranks and media, `predicted_blocks` those that are only predicted.
    `error_ratio` is the recent mean error of predicted cached tokens, as a fraction of the prompt;
    `evaluated_requests` were compared in total, and `error_tokens` is the sum of their errors."""

    state: KvState
    reason: str
    since_s: float
    epoch: int = 0
    sequence: int = 0
    blocks: int = 0
    predicted_blocks: int = 0
    resyncs: int = 0
    error_ratio: float = 0.0
    evaluated_requests: int = 0
    error_tokens: int = 0

    def with_errors(self, ratio: float, requests: int, tokens: int) -> KvStatus:
        """The same with the errors of predictions."""
        # `replace` looks every field up: three times the work, for each worker of a fleet that is looked at.
        return KvStatus(
            self.state,
            self.reason,
            self.since_s,
            self.epoch,
            self.sequence,
            self.blocks,
            self.predicted_blocks,
            self.resyncs,
            ratio,
            requests,
            tokens,
        )
