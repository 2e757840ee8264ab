"""Open-loop traffic of greedy streams on a simulated cluster, and what its clients received."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, Sampling
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.router import RequestSummary
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster


@dataclass(slots=True)
class Gaps:
    """The longest gap of each stream between two deltas, in seconds; an `on_stream` callback of Cluster."""

    clock: Clock
    longest: dict[str, float] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)

    def __call__(self, event: Delta | RequestSummary) -> None:
        """Record a delta that reached a client."""
        if isinstance(event, Delta):
            now = self.clock.now()
            gap = now - self._last.get(event.request_id, now)
            self.longest[event.request_id] = max(gap, self.longest.get(event.request_id, 0.0))
            self._last[event.request_id] = now


@dataclass(slots=True)
class Load:
    """Requests at `rate` per second with exponential gaps. Prompts have `prompt_tokens`, of which the first
    `shared` are one of `groups` common prefixes. `refused` counts refusals by code."""

    cluster: Cluster
    rng: Rng
    rate: float
    prompt_tokens: int = 64
    output_tokens: int = 16
    groups: int = 0
    shared: int = 0
    streams: list[ClientStream] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    _prefixes: list[list[int]] = field(default_factory=list)

    async def run(self, seconds: float) -> list[ClientStream]:
        """Send for that long; return the requests, which may still run."""
        clock, began, first = self.cluster.clock, self.cluster.clock.now(), len(self.streams)
        at_s = 0.0
        while True:
            at_s -= math.log(1.0 - self.rng.random()) / self.rate
            if at_s >= seconds:
                await clock.sleep(began + seconds - clock.now())
                return self.streams[first:]
            await clock.sleep(began + at_s - clock.now())
            self.send()

    def send(self, router_id: str | None = None) -> ClientStream | None:
        """Send one request; None if it was refused."""
        sampling = Sampling(max_tokens=self.output_tokens, temperature=0.0, ignore_eos=True)
        try:
            stream = self.cluster.submit(self._prompt(), sampling, router_id=router_id)
        except KvasirError as error:
            self.refused[error.code] += 1
            return None
        self.streams.append(stream)
        return stream

    def _prompt(self) -> list[int]:
        while len(self._prefixes) < self.groups:
            self._prefixes.append(self._tokens(self.shared))
        prefix = self._prefixes[self.rng.randrange(self.groups)] if self.groups else []
        return prefix + self._tokens(self.prompt_tokens - len(prefix))

    def _tokens(self, count: int) -> list[int]:
        return [100 + self.rng.randrange(3900) for _ in range(count)]


async def ended(streams: Iterable[ClientStream]) -> None:
    """Wait for all of them, however they end."""
    for stream in streams:
        await stream.ended.wait()


def outcomes(streams: Iterable[ClientStream]) -> dict[str, int]:
    """Number of requests by outcome."""
    return dict(sorted(Counter(stream.summary.outcome for stream in streams if stream.summary).items()))


def ttfts(streams: Iterable[ClientStream]) -> Iterator[float]:
    """TTFT of the requests that have one."""
    for stream in streams:
        ttft = None if stream.summary is None else stream.summary.ttft_s
        if ttft is not None:
            yield ttft
