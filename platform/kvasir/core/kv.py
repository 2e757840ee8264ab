"""What a worker says of the KV blocks that it holds: a log of changes, and snapshots to begin from.

A worker numbers its batches of changes within one epoch. Whoever follows it holds the worker's exact state
as long as no number is missing; after a gap, a restart or a late start it takes a snapshot and applies the
batches that follow it. The contract is that of etcd's watch: a position that is no longer to be had is said
so, and never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

LOG_ALIGNMENT = 8


class Medium(IntEnum):
    """Where a block's bytes are, fastest first. The values are those of the log."""

    DEVICE = 0
    CPU = 1
    DISK = 2
    REMOTE = 3


MEDIA = len(Medium)


@dataclass(frozen=True, slots=True)
class TierLoad:
    """One tier of a worker below the device. Counters only grow within one epoch.

    `loads` are reads of several blocks at once, which took `load_s` seconds together. `corrupt_blocks` were
    found and not believed, `dropped_blocks` were not written since too much waited, `failures` are calls that
    failed or passed their deadline. `trouble` says what is wrong for the time being and what to do, else "";
    a tier in trouble is read all the same where `readable`, as a full disk is.
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
    continues with the u64 name of the block before its first (0 or the chain's root for none); STORED and
    REMOVED end with `count` u64 names. The blocks of a STORED record follow each other in one chain; those
    of a REMOVED one are in any order. CLEARED has count 0: nothing is held on this rank and medium.
    Storing a block that is held, or removing one that is not, changes nothing.
    """

    STORED = 1
    REMOVED = 2
    CLEARED = 3


@dataclass(frozen=True, slots=True)
class KvBatch:
    """The changes of one flush. `sequence` counts batches from 1 without holes within `epoch`."""

    epoch: int
    sequence: int
    log: bytes


@dataclass(frozen=True, slots=True)
class KvSnapshotPart:
    """One part of a snapshot: STORED records.

    All parts carry the `epoch` and `sequence` at which the snapshot began. Applying every batch with a
    greater sequence, in order, on top of all parts gives the worker's state: what changed while the parts
    were made is in those batches. Without the part marked `last` none may be used.
    """

    epoch: int
    sequence: int
    log: bytes
    last: bool


class KvState(StrEnum):
    """How far the router's picture of a worker's cache can be trusted.

    EXACT: every change up to the newest batch is in. CATCHING_UP: a snapshot is on its way, and only
    predictions are used meanwhile. PREDICTED: the worker reports nothing, or is not believed.
    """

    EXACT = "exact"
    CATCHING_UP = "catching_up"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class KvStatus:
    """A worker's cache as the router sees it. `since_s` is a reading of the router's clock; `blocks`
    counts reported blocks over all ranks and media, `predicted_blocks` those that are only predicted.
    `error_ratio` is the mean error lately of predicted against reported cached tokens, as a fraction of the
    prompt; `evaluated_requests` have been compared in all, and `error_tokens` is the sum of their errors."""

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
