"""Keeps what ended requests leave for each reader, within bounds, while there are readers.

A reader that stops asking is forgotten, so nobody has to end a recording. What does not fit is dropped and
counted; serving never waits for a reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import lcm

from kvasir.core.errors import CapacityError
from kvasir.core.requests import Request
from kvasir.ports.recordings import RecordingBatch, RecordingQuery
from kvasir.ports.router import RequestSummary
from kvasir_router.fleet.decision_entry import DecisionEntry
from kvasir_router.fleet.work import PromptBlocks
from kvasir_router.recordings.rows import EndedRequest, rows_of

BlocksOf = Callable[[Request], PromptBlocks]
"""Names the blocks of a request's prompt."""

MOST_READERS = 4
MOST_RECORDS = 20_000
MOST_BLOCKS = 4 << 20
"""Records, and names of blocks in them, that wait for one reader: at most about 32 MiB of names."""
BATCH_RECORDS = 50
BATCH_BLOCKS = 32_768
"""Records, and names of blocks, of one answer: rendering them holds up the event loop."""
FORGOTTEN_S = 30.0
"""After this long without a call, a reader is forgotten."""
MOST_BLOCK_TOKENS = 1 << 20


@dataclass(slots=True)
class _Reader:
    opened: str
    opened_s: float
    called_s: float
    closed_s: float | None = None
    waiting: deque[EndedRequest] = field(default_factory=deque)
    blocks: int = 0
    first: int = 1
    """The number of the first record that waits."""
    dropped: int = 0

    def wants(self, arrival_s: float) -> bool:
        """Whether a request that arrived then is part of the recording."""
        return self.opened_s <= arrival_s and (self.closed_s is None or arrival_s < self.closed_s)

    def put(self, ended: EndedRequest) -> None:
        """Keep a record, or count it as dropped."""
        if len(self.waiting) >= MOST_RECORDS or self.blocks + len(ended.names) > MOST_BLOCKS:
            self.dropped += 1
            return
        self.waiting.append(ended)
        self.blocks += len(ended.names)

    def forget(self, last: int) -> None:
        """Forget the records up to this number."""
        while self.waiting and self.first <= last:
            self.blocks -= len(self.waiting.popleft().names)
            self.first += 1

    def next(self) -> list[EndedRequest]:
        """Return the records of the next answer; they stay until they are forgotten."""
        taken: list[EndedRequest] = []
        blocks = 0
        for ended in self.waiting:
            blocks += len(ended.names)
            if taken and (len(taken) >= BATCH_RECORDS or blocks > BATCH_BLOCKS):
                break
            taken.append(ended)
        return taken


class Recordings:
    """`kvasir.ports.recordings.RecordingPort` of all routers of a process. `name` is unique among routers;
    `now` reads their clock.

    While `active` is false, a router calls nothing else.
    """

    def __init__(self, name: str, policy: str, now: Callable[[], float]) -> None:
        self.active = False
        self._name = name
        self._policy = policy
        self._now = now
        self._readers: dict[str, _Reader] = {}
        self._live: dict[str, Request] = {}
        self._block_sizes: set[int] = set()
        self._openings = 0

    # -- readers ---------------------------------------------------------------------------------

    def read(self, reader: str, query: RecordingQuery) -> RecordingBatch:
        """See RecordingPort."""
        now = self._now()
        self._forget(now)
        found = self._readers.get(reader) or self._open(reader, now)
        found.called_s = now
        if query.closing and found.closed_s is None:
            found.closed_s = now
        found.forget(query.after)
        taken = [] if query.done else found.next()
        if query.done:
            self._remove([reader])
        block_tokens = min(lcm(query.block_tokens, *self._block_sizes), MOST_BLOCK_TOKENS)
        return RecordingBatch(
            found.opened,
            now - found.opened_s,
            tuple(rows_of(taken, query, block_tokens, found.opened_s, self._policy)),
            found.first + len(taken) - 1,
            found.dropped,
            sum(found.wants(request.arrival_s) for request in self._live.values()),
            len(taken) < len(found.waiting),
            block_tokens,
        )

    def _open(self, reader: str, now: float) -> _Reader:
        if len(self._readers) >= MOST_READERS:
            raise CapacityError(
                f"{len(self._readers)} recordings are read from this router, the most at once; end one, and "
                f"try again {FORGOTTEN_S:.0f} s later",
                code="too_many_recordings",
                retry_after_s=FORGOTTEN_S,
            )
        self._openings += 1
        opened = _Reader(f"{self._name}/{self._openings}", now, now)
        self._readers[reader] = opened
        self.active = True
        return opened

    def _forget(self, now: float) -> None:
        """Forget readers that stopped asking."""
        gone = [name for name, reader in self._readers.items() if now - reader.called_s > FORGOTTEN_S]
        if gone:
            self._remove(gone)

    def _remove(self, readers: list[str]) -> None:
        for name in readers:
            del self._readers[name]
        if not self._readers:
            self.active = False
            self._live.clear()

    # -- requests --------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Note a request that a router has accepted. Requests of a router end; none is noted for ever."""
        self._live[request.request_id] = request

    def refused(self, request: Request, code: str, blocks_of: BlocksOf) -> None:
        """Record a request that a router has refused on arrival."""
        now = self._now()
        self._live[request.request_id] = request
        summary = RequestSummary(
            request.request_id, request.model, code, request.arrival_s, now, slo=request.slo, refused=True
        )
        self.ended(summary, None, blocks_of)

    def ended(
        self,
        summary: RequestSummary,
        decision: DecisionEntry | None,
        blocks_of: BlocksOf,
    ) -> None:
        """Record a request that has ended; one that was not noted is ignored."""
        request = self._live.pop(summary.request_id, None)
        if request is None:
            return
        self._forget(self._now())
        readers = [reader for reader in self._readers.values() if reader.wants(request.arrival_s)]
        if not readers:
            return
        names, block_size, expected = blocks_of(request)
        if block_size:
            self._block_sizes.add(block_size)
        ended = EndedRequest.of(
            request, summary, decision, names=names, block_size=block_size, expected_tokens=expected
        )
        for reader in readers:
            reader.put(ended)
