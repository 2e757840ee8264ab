"""Puts load on an endpoint: at the times of a workload (open loop), or a number of calls at a time (closed).

An open loop sends whether or not earlier calls have ended, as independent users do; only it can show a queue
that grows. What the generator itself is late by is recorded, so that a slow client is not taken for a slow
server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvasir.ports.clock import Clock
from kvasir_platform.bench.client.endpoint import BenchCall, BenchEndpoint
from kvasir_platform.bench.tally import BenchTally
from kvasir_platform.workload.requests import WorkloadRequest

MOST_AT_A_TIME = 8_192


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """`concurrency` None: an open loop, of at most `at_a_time` running calls. A closed loop starts no call
    after `duration_s`."""

    concurrency: int | None = None
    duration_s: float = float("inf")
    at_a_time: int = MOST_AT_A_TIME


class LoadGenerator:
    """Sends the calls of workloads to `endpoint`; `make` gives the text of a request's prompt."""

    def __init__(self, endpoint: BenchEndpoint, clock: Clock, make: Callable[[WorkloadRequest], str]) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._make = make

    async def run(self, requests: Iterable[WorkloadRequest], limits: LoadLimits, tally: BenchTally) -> None:
        """Send all of them and await their ends. Cancelled, it gives up those that run, and has tallied
        them."""
        if limits.concurrency is None:
            await self._open_loop(requests, limits, tally)
        else:
            await self._closed_loop(requests, limits, limits.concurrency, tally)

    async def _open_loop(
        self, requests: Iterable[WorkloadRequest], limits: LoadLimits, tally: BenchTally
    ) -> None:
        began = self._clock.now()
        room = asyncio.Semaphore(limits.at_a_time)
        async with asyncio.TaskGroup() as running:
            for request in requests:
                # Made ahead of its time, or long prompts would be late.
                call = self._call(request)
                due = began + request.arrival_s
                if (wait := due - self._clock.now()) > 0.0:
                    await self._clock.sleep(wait)
                await room.acquire()
                task = running.create_task(self._send(call, request, due, tally))
                task.add_done_callback(lambda _: room.release())

    async def _closed_loop(
        self, requests: Iterable[WorkloadRequest], limits: LoadLimits, concurrency: int, tally: BenchTally
    ) -> None:
        end = self._clock.now() + limits.duration_s
        source = iter(requests)
        async with asyncio.TaskGroup() as running:
            for _ in range(concurrency):
                running.create_task(self._client(source, end, tally))

    async def _client(self, source: Iterator[WorkloadRequest], end: float, tally: BenchTally) -> None:
        for request in source:
            if self._clock.now() >= end:
                return
            await self._send(self._call(request), request, self._clock.now(), tally)

    def _call(self, request: WorkloadRequest) -> BenchCall:
        # A recorded request that failed has no output, but no server generates none.
        return BenchCall(self._make(request), max(1, request.output_tokens), request.embeds)

    async def _send(self, call: BenchCall, request: WorkloadRequest, due: float, tally: BenchTally) -> None:
        tally.begin(self._clock.now() - due)
        try:
            result = await self._endpoint.send(call)
        except asyncio.CancelledError:
            tally.cut_off()
            raise
        tally.end(result, request.prompt_tokens, request.output_tokens)
