"""What the index is told and what it wants done about workers' snapshots; free of the tree behind it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvasir.core.kv import KvState


class IndexMode(StrEnum):
    """How a worker's cache is known: from both sources, from what it reports, or from what was foreseen."""

    HYBRID = "hybrid"
    REPORTED = "reported"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class IndexViewId:
    """Which view of a worker's cache a prediction came from. Another one has errors of its own."""

    state: KvState
    epoch: int
    resyncs: int


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Ask the worker for all that it holds; replaces an earlier attempt. `epoch` is the newest that is
    known of it, 0 for none."""

    worker_id: str
    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True)
class CancelSnapshot:
    """The worker's snapshot is not wanted any more."""

    worker_id: str


IndexEffect = FetchSnapshot | CancelSnapshot


@dataclass(frozen=True, slots=True)
class CatchUpLimits:
    """Bounds of one worker's way back to EXACT.

    Batches that arrive while its snapshot is on the way wait, up to `pending_batches` and `pending_bytes`;
    beyond that the snapshot begins again. Bulk work is done in slices of `slice_blocks`, `pace_s` apart, so
    that decisions come in between. Attempts that failed, and those that follow soon upon each other, are
    `backoff_min_s` apart, then twice as far each time, up to `backoff_max_s`.
    """

    pending_batches: int = 4096
    pending_bytes: int = 8 << 20
    slice_blocks: int = 8192
    pace_s: float = 0.001
    backoff_min_s: float = 0.05
    backoff_max_s: float = 5.0
