"""One batch at work: its lines go to their endpoint, and each result is stored before it is counted.

A process that ends in any way leaves a journal, from which the next one goes on: lines with a result are not
executed again. Lines that were running when it was killed have none, and are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterator
from typing import Literal

from kvasir.core.errors import CapacityError, RequestError, UpstreamError
from kvasir.ports.clock import Clock
from kvasir.telemetry.reasons import CLIENT_CLOSED
from kvasir_platform.gateway.batches.context import BatchContext
from kvasir_platform.gateway.batches.line_exchange import LineExchange
from kvasir_platform.gateway.batches.lines import BatchLines
from kvasir_platform.gateway.batches.names import created_s, error_file, output_file
from kvasir_platform.gateway.batches.pace import LinePace
from kvasir_platform.gateway.batches.results import (
    BatchEnd,
    counted,
    error_pieces,
    output_pieces,
    result_of,
)
from kvasir_platform.gateway.batches.schema import FINAL, BatchError, BatchErrors, BatchObject
from kvasir_platform.gateway.batches.storage.journal import Journal, LineResult

_log = logging.getLogger(__name__)

_GATHER_S = 0.05
"""Results of this time are stored together."""
_SHOWN_S = 0.5
"""The batch that clients see is written this often."""
_WATCH_S = 1.0
_RETRY_S = 1.0
_CREATION_S = 600.0
"""Within this time of its mark, a batch is stored."""
_SLICE = 8
"""Lines that start in one turn of the loop, which streams share."""
_MOST_RESULTS = 1024
"""Results that wait for a slow storage; beyond them no line starts."""
_TRIES = 3
"""Of a line whose worker fails."""


class BatchRun:
    """The work on one batch by the holder of the fencing `token`."""

    def __init__(self, context: BatchContext, tenant: str, name: str, token: int, pace: LinePace) -> None:
        self._context = context
        self._tenant = tenant
        self._name = name
        self._pace = pace
        self._journal = Journal(context.storage, f"{tenant}/journals/{name}", token)
        self._batch: BatchObject
        self._lines: BatchLines
        self._waiting: deque[int] = deque()
        self._running: dict[int, LineExchange] = {}
        self._ended: list[LineExchange] = []
        self._results: list[LineResult] = []
        self._tries: Counter[int] = Counter()
        self._wake = asyncio.Event()
        self._look = asyncio.Event()
        self._over: BatchEnd | Literal["stopped", "lost"] | None = None
        self._storing: asyncio.Task[None] | None = None
        self._shown_s = context.clock.now()

    def stop(self) -> None:
        """Start no more lines; `run` returns when those that run have ended, or at `abandon`. Idempotent."""
        self._end_as("stopped")

    def abandon(self) -> None:
        """Give up the lines that run, after `stop`: they get no result. Other results are stored."""
        for exchange in list(self._running.values()):
            self._pace.dropped()
            exchange.gone(CLIENT_CLOSED)
        self._context.stats.lines_running -= len(self._running)
        self._running.clear()
        self._wake.set()

    def lose(self) -> None:
        """Another process may have the lease: give up all lines, and store nothing more."""
        self._end_as("lost")

    def look(self) -> None:
        """The batch may have been cancelled."""
        self._look.set()

    async def run(self) -> bool:
        """Work until the batch has ended, or `stop`. Return whether it has ended."""
        found = await self._context.later(lambda: self._context.batches.read(self._tenant, self._name))
        if found is None:
            return await self._never_created()
        self._batch = found
        if found.status in FINAL:
            await self._close()
            return True
        if not await self._prepared():
            return True
        await self._check()
        watch = asyncio.create_task(self._watch(), name="batch watch")
        try:
            await self._execute()
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        match self._over:
            case "stopped" | "lost":
                return False
            case end:
                await self._finish(end or "completed")
                return True

    # -- before the first line

    async def _never_created(self) -> bool:
        """Remove a mark whose process ended before it stored the batch itself, unless it may still do so."""
        context = self._context
        if context.wall() < created_s(self._name) + _CREATION_S:
            return False
        await context.later(lambda: context.batches.close(self._tenant, self._name))
        return True

    async def _prepared(self) -> bool:
        """Read the file and what was done of it. Return False if the batch has failed."""
        context, batch = self._context, self._batch
        try:
            content = await self._context.later(
                lambda: context.files.content(self._tenant, batch.input_file_id)
            )
        except RequestError as error:
            await self._fail([BatchError(error.code, error.message, "input_file_id", None)])
            return False
        self._lines = lines = await self._context.later(lambda: BatchLines(content))
        if batch.status == "validating":
            errors = await self._context.later(
                lambda: lines.errors(batch.endpoint, context.spec.max_lines, context.max_line_bytes)
            )
            if errors:
                await self._fail(errors)
                return False
            batch.status, batch.in_progress_at = "in_progress", int(context.wall())
            batch.request_counts.total = len(lines)
            batch.model = lines.model()
            await self._context.later(self._write)
        done = await self._context.later(lambda: list(self._journal.results()))
        self._batch = counted(batch, done, anew=True)
        finished = {result.number for result in done}
        self._waiting.extend(number for number in range(len(lines)) if number not in finished)
        return True

    async def _fail(self, errors: list[BatchError]) -> None:
        batch = self._batch
        batch.status, batch.failed_at = "failed", int(self._context.wall())
        batch.errors = BatchErrors("list", errors)
        await self._close()

    # -- the lines

    async def _execute(self) -> None:
        """Run lines until none is left, or the batch is over for another reason; all results are stored
        then."""
        clock = self._context.clock
        while True:
            self._wake.clear()
            self._take_ended()
            self._store_soon()
            wait_s = self._start_some()
            if not (self._running or self._ended or self._results or self._storing) and (
                self._over is not None or not self._waiting
            ):
                return
            if wait_s == 0.0:
                await clock.sleep(0.0)
            elif wait_s is None:
                await self._wake.wait()
            else:
                await set_within(self._wake, wait_s, clock)

    def _start_some(self) -> float | None:
        """Start lines while the pace allows. Return the time until more may start, None if that takes an
        event."""
        for _ in range(_SLICE):
            if self._over is not None or not self._waiting or len(self._results) >= _MOST_RESULTS:
                return None
            wait_s = self._pace.wait_s(self._context.clock.now())
            if wait_s != 0.0:
                return wait_s
            self._start(self._waiting.popleft())
        return 0.0

    def _start(self, number: int) -> None:
        context, endpoint = self._context, self._batch.endpoint
        line = self._lines.line(number)
        exchange = LineExchange(
            endpoint,
            bytes(line.body),
            request_id=context.new_id(),
            now=context.clock.now(),
            number=number,
            custom_id=line.custom_id,
            done=self._note,
        )
        self._pace.started()
        context.stats.lines_running += 1
        self._running[number] = exchange
        try:
            context.endpoints[endpoint](context.callers(self._tenant), exchange)
        except Exception as error:  # noqa: BLE001 - whatever it raises is its answer, as for a client's call
            context.answer(exchange, error)

    def _note(self, exchange: LineExchange) -> None:
        self._ended.append(exchange)
        self._wake.set()

    def _take_ended(self) -> None:
        ended, self._ended = self._ended, []
        for exchange in ended:
            number, error = exchange.number, exchange.error
            if self._running.pop(number, None) is None:
                continue
            stats = self._context.stats
            stats.lines_running -= 1
            if isinstance(error, CapacityError):
                self._pace.refused(self._context.clock.now())
                self._waiting.appendleft(number)
                stats.lines["sent_again"] += 1
                continue
            self._pace.ended()
            self._tries[number] += isinstance(error, UpstreamError)
            if isinstance(error, UpstreamError) and self._tries[number] < _TRIES:
                self._waiting.append(number)
                stats.lines["sent_again"] += 1
            else:
                result = result_of(exchange)
                stats.lines["answered" if result.ok else "failed"] += 1
                self._results.append(result)

    # -- results

    def _store_soon(self) -> None:
        if self._storing is None and self._results:
            self._storing = asyncio.create_task(self._store(), name="batch results")
            self._storing.add_done_callback(self._stored)

    def _stored(self, task: asyncio.Task[None]) -> None:
        self._storing = None
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("results of %s are not stored", self._name, exc_info=error)
            self._end_as("lost")

    async def _store(self) -> None:
        """Store the results of a moment, then count them."""
        clock = self._context.clock
        await clock.sleep(_GATHER_S)
        results, self._results = self._results, []
        while self._over != "lost":
            try:
                await self._context.later(lambda: self._journal.append(results))
            except CapacityError as error:
                _log.warning("results of %s wait: %s", self._name, error.message)
                await clock.sleep(_RETRY_S)
                continue
            self._batch = counted(self._batch, results)
            if clock.now() - self._shown_s >= _SHOWN_S:
                self._shown_s = clock.now()
                try:
                    await self._context.later(self._write)
                except CapacityError as error:
                    _log.warning("%s: %s", self._name, error.message)
            return

    # -- the end

    async def _watch(self) -> None:
        """Check at intervals, and after `look`."""
        while self._over is None:
            await set_within(self._look, _WATCH_S, self._context.clock)
            self._look.clear()
            await self._check()

    async def _check(self) -> None:
        """End if the batch is cancelled or expired."""
        context = self._context
        if context.wall() >= self._batch.expires_at:
            self._end_as("expired")
            return
        try:
            if await context.later(lambda: context.batches.cancelled_at(self._tenant, self._name)):
                self._end_as("cancelled")
        except CapacityError as error:
            _log.warning("%s: %s", self._name, error.message)

    def _end_as(self, why: BatchEnd | Literal["stopped", "lost"]) -> None:
        if self._over is None or why == "lost":
            self._over = why
        if why == "lost":
            # Another process executes these lines.
            self._results.clear()
            self.abandon()
        self._wake.set()

    async def _finish(self, end: BatchEnd) -> None:
        """Make the files of the results. After a crash it is repeated, with the same ids."""
        context, batch, tenant = self._context, self._batch, self._tenant
        batch.status, batch.finalizing_at = "finalizing", int(context.wall())
        await self._context.later(self._write)

        def make_files() -> None:
            output, errors = output_file(batch.id), error_file(batch.id)
            if batch.request_counts.completed:
                pieces = output_pieces(self._stored_results())
                context.files.put(tenant, output, f"{batch.id}_output.jsonl", "batch_output", pieces)
                batch.output_file_id = output
            if batch.request_counts.completed < batch.request_counts.total:
                pieces = error_pieces(self._stored_results(), self._lines, end)
                context.files.put(tenant, errors, f"{batch.id}_error.jsonl", "batch_output", pieces)
                batch.error_file_id = errors

        await self._context.later(make_files)
        now = int(context.wall())
        batch.status = end
        if end == "completed":
            batch.completed_at = now
        elif end == "expired":
            batch.expired_at = now
        else:
            batch.cancelled_at = now
            batch.cancelling_at = await self._context.later(
                lambda: context.batches.cancelled_at(tenant, batch.id)
            )
        await self._close()

    def _stored_results(self) -> Iterator[LineResult]:
        """Yield all results. Raise CapacityError behind them, so that no file is made of them, if another
        process has taken the work over: it may be removing the journal."""
        read = 0
        for result in self._journal.results():
            read += 1
            yield result
        counts = self._batch.request_counts
        self._stay(read >= counts.completed + counts.failed)

    def _write(self) -> None:
        """Store the state of the batch, if it is this process that works on it."""
        self._stay()
        self._context.batches.write(self._tenant, self._batch)

    def _stay(self, complete: bool = True) -> None:
        if self._over == "lost" or not complete or not self._context.lease.keep(self._name):
            raise CapacityError(f"The lease of {self._name} is lost.", code="storage_unavailable")

    async def _close(self) -> None:
        """Store the final state, and remove what only a running batch needs."""
        context, tenant = self._context, self._tenant

        def close() -> None:
            self._write()
            self._journal.clear()
            context.batches.close(tenant, self._name)

        await self._context.later(close)


async def set_within(event: asyncio.Event, seconds: float, clock: Clock) -> None:
    """Wait until an event is set, for at most `seconds`."""
    waits = (asyncio.create_task(event.wait()), asyncio.create_task(clock.sleep(seconds)))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
