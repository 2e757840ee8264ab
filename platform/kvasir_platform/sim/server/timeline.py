"""Frames of a run, for the page that plays it: bounded, whatever the run's length and size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

MOST_WORKERS = 64
MOST_TRANSFERS = 2000
MOST_MARKS = 500


class WorkerSample(NamedTuple):
    """One worker at one time: `state` is s(erving), d(raining), w (starting) or x (lost)."""

    state: str
    waiting: int
    prefilling: int
    decoding: int
    kv: float


class TimelineSample(NamedTuple):
    """All workers at one time, by name, and the router's queue; the counts are totals since the start."""

    at_s: float
    queued: int
    arrived: int
    ended: int
    met: int
    refused: int
    output_tokens: float
    workers: dict[str, WorkerSample]


class TransferMark(NamedTuple):
    """KV that moved between two workers."""

    begin_s: float
    end_s: float
    source: str
    target: str
    megabytes: float


class EventMark(NamedTuple):
    """Something that happened, in words."""

    at_s: float
    text: str


@dataclass(slots=True)
class Timeline:
    """Samples every `step_s`, at most `most` frames: when there are more, every second one is dropped, and
    the distance doubles. Of the workers, the first MOST_WORKERS are kept one by one."""

    most: int
    step_s: float
    frames: list[TimelineSample] = field(default_factory=list)
    transfers: list[TransferMark] = field(default_factory=list)
    events: list[EventMark] = field(default_factory=list)
    pools: dict[str, str] = field(default_factory=dict)

    def add(self, frame: TimelineSample, *, last: bool = False) -> None:
        """Keep a frame, if its time has come or it is the last."""
        if not last and self.frames and frame.at_s < self.frames[-1].at_s + self.step_s - 1e-9:
            return
        self.frames.append(frame)
        if len(self.frames) > 2 * self.most:
            self.frames = self.frames[::2]
            self.step_s *= 2

    def moved(self, mark: TransferMark) -> None:
        """Keep a transfer."""
        if len(self.transfers) < MOST_TRANSFERS:
            self.transfers.append(mark)

    def happened(self, at_s: float, text: str) -> None:
        """Keep an event."""
        if len(self.events) < MOST_MARKS:
            self.events.append(EventMark(at_s, text))

    def knows(self, worker_id: str, pool: str) -> bool:
        """Whether a worker is kept; the first ones are."""
        if worker_id not in self.pools and len(self.pools) < MOST_WORKERS:
            self.pools[worker_id] = pool
        return worker_id in self.pools
