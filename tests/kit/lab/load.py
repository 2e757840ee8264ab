"""Closed and open load on a gateway, and its outcomes."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.kit.lab.stream import Ask, Outcome, complete

from kvasir.core import quantiles
from kvasir.ports.clock import Clock, Rng
from kvasir_workers.engines.sim.model import SimModel

_VOCABULARY = SimModel().vocab_size


def asks(rng: Rng, prompt_tokens: int, tokens: int) -> Iterator[Ask]:
    """An endless iterator of different prompts of that length."""
    while True:
        yield Ask(tuple(2 + rng.randrange(_VOCABULARY - 2) for _ in range(prompt_tokens)), tokens)


async def closed_loop(address: str, work: Iterable[Ask], width: int, clock: Clock) -> list[Outcome]:
    """Run all of `work`, `width` at a time; outcomes are in the order of completion."""
    source, outcomes = iter(work), list[Outcome]()

    async def client() -> None:
        for ask in source:
            outcomes.append(await complete(address, ask, clock))

    await asyncio.gather(*(client() for _ in range(width)))
    return outcomes


class OpenLoop:
    """Requests that arrive at random times, `rate` per second on average, independent of earlier ones.

    `addresses` are used in turn. At most `limit` streams run at a time. An arrival beyond the limit is
    counted in `skipped`, because a load that silently became lighter would prove nothing.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        work: Iterator[Ask],
        rate: float,
        *,
        clock: Clock,
        rng: Rng,
        limit: int = 2000,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.skipped = 0
        self._addresses = addresses
        self._work = work
        self._rate = rate
        self._clock = clock
        self._rng = rng
        self._limit = limit
        self._arriving: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start sending."""
        self._arriving = asyncio.ensure_future(self._arrive())

    @property
    def under_way(self) -> int:
        """The running streams."""
        return len(self._under_way)

    async def stop(self, grace_s: float = 60.0) -> list[Outcome]:
        """Stop sending and wait for running streams. Raise TimeoutError."""
        if self._arriving is not None:
            self._arriving.cancel()
            await asyncio.gather(self._arriving, return_exceptions=True)
        if self._under_way:
            _, late = await asyncio.wait(self._under_way, timeout=grace_s)
            if late:
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
                raise TimeoutError(f"{len(late)} streams did not end within {grace_s:g} s")
        return self.outcomes

    async def _arrive(self) -> None:
        turn, at = 0, self._clock.now()
        while True:
            at += -math.log(1.0 - self._rng.random()) / self._rate
            await self._clock.sleep(at - self._clock.now())
            if len(self._under_way) >= self._limit:
                self.skipped += 1
                continue
            address = self._addresses[turn % len(self._addresses)]
            turn += 1
            task = asyncio.ensure_future(self._one(address, next(self._work)))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _one(self, address: str, ask: Ask) -> None:
        self.outcomes.append(await complete(address, ask, self._clock))


@dataclass(frozen=True, slots=True)
class Tally:
    """Results of many streams. Gaps and TTFT are of successful streams, in seconds; `gap_p99_s` is over the
    longest gap of each stream."""

    streams: int
    exact: int
    tokens: int
    errors: dict[str, int]
    gap_p99_s: float
    ttft_p99_s: float

    @property
    def all_exact(self) -> bool:
        """Whether every stream got exactly its tokens."""
        return self.exact == self.streams


def tally(outcomes: Sequence[Outcome]) -> Tally:
    """Check every answer; costs some microseconds per token."""
    well = [each for each in outcomes if not each.error]
    errors = Counter(each.error for each in outcomes if each.error)
    exact = sum(each.exact for each in outcomes)
    if wrong := sum(not each.exact for each in well):
        errors["wrong_tokens"] = wrong
    return Tally(
        streams=len(outcomes),
        exact=exact,
        tokens=sum(each.ask.tokens for each in well),
        errors=dict(errors),
        gap_p99_s=quantile([each.longest_gap_s for each in well], 0.99),
        ttft_p99_s=quantile([each.ttft_s for each in well], 0.99),
    )


def quantile(samples: Sequence[float], q: float) -> float:
    """The smallest sample that is at least as large as a share `q` of all; NaN without samples."""
    if not samples:
        return math.nan
    return quantiles.quantile(samples, q)
