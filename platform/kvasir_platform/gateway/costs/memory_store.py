"""Costs kept in memory, for a router without a file or a server: until it stops."""

from __future__ import annotations

from kvasir.ports.stores.costs import CostBatch, CostGroup, CostRecords, WorkerHour, WorkSums

MOST_ROWS = 200_000
"""Groups, and worker hours, that are kept; the oldest hours go first."""


class MemoryCosts:
    """`kvasir.ports.stores.costs.CostStore` in memory."""

    def __init__(self) -> None:
        self._work: dict[CostGroup, WorkSums] = {}
        self._workers: dict[tuple[int, str, str, str], WorkerHour] = {}
        self._numbers: dict[str, int] = {}

    async def add(self, batch: CostBatch) -> None:
        """See CostStore."""
        if self._numbers.get(batch.writer, 0) >= batch.number:
            return
        self._numbers[batch.writer] = batch.number
        for group, sums in batch.work.items():
            known = self._work.get(group)
            self._work[group] = sums if known is None else known.plus(sums)
        for each in batch.workers:
            self._workers[each[:4]] = each
        while max(len(self._work), len(self._workers)) > MOST_ROWS:
            hours = {group.hour for group in self._work} | {each.hour for each in self._workers.values()}
            await self.forget(min(hours) + 1)

    async def read(self, since: int, until: int) -> CostRecords:
        """See CostStore."""
        return CostRecords(
            {group: sums for group, sums in self._work.items() if since <= group.hour < until},
            [each for each in self._workers.values() if since <= each.hour < until],
        )

    async def forget(self, before: int) -> None:
        """See CostStore."""
        self._work = {group: sums for group, sums in self._work.items() if group.hour >= before}
        self._workers = {key: each for key, each in self._workers.items() if key[0] >= before}

    async def close(self) -> None:
        """See CostStore."""
