"""The port through which a router's requests are recorded, without their content.

A reader has a name, and asks again and again for what has ended since. Nothing is kept before its first call,
or after it has not called for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class RecordingQuery:
    """What a reader asks for. `after` is the number of the last record that it has; the router may forget
    that and all before it. Names are salted with `salt`, those of blocks of `block_tokens` tokens, and unless
    `names`, those of tenants and sessions. `decisions`, `ids`, `prefixes`: whether decisions, the router's
    ids of requests, and names of blocks are wanted. `closing`: requests that arrive from the first such call
    on are left out. `done`: the reader has all that it wants, and is forgotten."""

    salt: bytes
    after: int = 0
    block_tokens: int = 64
    names: bool = False
    decisions: bool = True
    ids: bool = False
    prefixes: bool = True
    closing: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class RecordingBatch:
    """Records with the numbers up to `last`, as docs/RECORDING.md describes their fields; times count from
    the beginning of the recording, `elapsed_s` ago. `opened` identifies that beginning: another value says
    that the router has forgotten what was not read. `dropped` counts records for which there was no room
    since then. `running` are requests that were noted and have not ended; `more`: further records can be read
    at once. `block_tokens` is the least multiple of what was asked for that fits the blocks of all that was
    recorded."""

    opened: str
    elapsed_s: float
    records: tuple[Mapping[str, Any], ...]
    last: int
    dropped: int
    running: int
    more: bool
    block_tokens: int


class RecordingPort(Protocol):
    """Records the requests of a router."""

    def read(self, reader: str, query: RecordingQuery) -> RecordingBatch:
        """Return the next records for a reader; the first call for its name begins its recording. Raises
        CapacityError (`too_many_recordings`) if there are too many readers."""
        ...
