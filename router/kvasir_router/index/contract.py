"""Inputs of the index, and its effects on workers' snapshots; independent of the tree."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvasir.core.kv import KvState


class IndexMode(StrEnum):
    """Source of a worker's cache contents: reports and predictions, reports only, or predictions only."""

    HYBRID = "hybrid"
    REPORTED = "reported"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class IndexViewId:
    """The source of a prediction; each source has errors of its own."""

    state: KvState
    epoch: int
    resyncs: int


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Fetch a snapshot of all that the worker holds; replaces an earlier attempt. `epoch` is the newest
    known, 0 for none."""

    worker_id: str
    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True)
class CancelSnapshot:
    """Cancel the fetch of the worker's snapshot."""

    worker_id: str


IndexEffect = FetchSnapshot | CancelSnapshot


@dataclass(frozen=True, slots=True)
class CatchUpLimits:
    """Bounds of one worker's return to EXACT.

    Batches that arrive during the snapshot are buffered, up to `pending_batches` and `pending_bytes`; beyond
    that the snapshot restarts. Bulk work is done in slices of `slice_blocks`, `pace_s` apart, so that
    decisions run in between. Failed attempts, and attempts in quick succession, are `backoff_min_s` apart,
    doubling up to `backoff_max_s`.
    """

    pending_batches: int = 4096
    pending_bytes: int = 8 << 20
    slice_blocks: int = 4096
    pace_s: float = 0.001
    backoff_min_s: float = 0.05
    backoff_max_s: float = 5.0
