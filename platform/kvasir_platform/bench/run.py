"""One benchmark from start to end: probe the server, warm it up, put load on it, sum up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Clock
from kvasir_platform.bench.client.dialect import Api, Dialect
from kvasir_platform.bench.client.http_endpoint import HttpConnections, HttpEndpoint
from kvasir_platform.bench.client.probe import ProbedServer, chosen_model, probe_server
from kvasir_platform.bench.client.prompts import PromptMaker
from kvasir_platform.bench.figures import BenchFigures, figures_of
from kvasir_platform.bench.load import LoadGenerator, LoadLimits
from kvasir_platform.bench.ramp import RampPlan, RampSearch
from kvasir_platform.bench.report.result import BenchResult, course_of, samples_of
from kvasir_platform.bench.slo import BenchSlo
from kvasir_platform.bench.tally import BenchTally
from kvasir_platform.workload.requests import Workload, WorkloadRequest

_WARMUP_AT_A_TIME = 8
_LEAST_SPARE = 8
"""Tokens by which a prompt may be longer than asked for."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is asked for. `limits.concurrency` None: an open loop. `model` None: the server's first. `warmup`
    requests are sent before each measurement. `more` are fields of every body. `began` is when, for the
    report."""

    limits: LoadLimits
    slo: BenchSlo
    api: Api = "chat"
    model: str | None = None
    warmup: int = 8
    more: Mapping[str, Any] = field(default_factory=dict)
    began: str = ""


@dataclass(slots=True)
class BenchProgress:
    """What a progress bar shows: the tally of the load that runs, how many requests it has, and its name."""

    step: str = ""
    total: int = 0
    tally: BenchTally = field(default_factory=BenchTally)


async def prepared(
    connections: HttpConnections, options: BenchOptions, say: Callable[[str], None], rng: random.Random
) -> ProbedServer:
    """Find the model, and probe its server. Raises UpstreamError."""
    model = chosen_model(await connections.models(), options.model, say)
    return await probe_server(
        connections, model, Dialect(options.api), options.more, salt=rng.getrandbits(64)
    )


class BenchRun:
    """A benchmark of `server`, behind `connections`. `say` receives a line for each step. Measurements that
    are cancelled return what they have."""

    def __init__(
        self,
        connections: HttpConnections,
        server: ProbedServer,
        options: BenchOptions,
        *,
        clock: Clock,
        say: Callable[[str], None],
        rng: random.Random,
    ) -> None:
        self._connections = connections
        self._server = server
        self._options = options
        self._clock = clock
        self._say = say
        self._rng = rng
        self.progress = BenchProgress()

    async def measure(self, workload: Workload) -> BenchResult:
        """Put the workload on the server. Raises ConfigError if nothing of it fits the model."""
        limits = self._options.limits
        tally, interrupted = await self._loaded(workload, "load", limits)
        mode = "open loop" if limits.concurrency is None else f"closed loop, {limits.concurrency} at a time"
        return self._result(tally, workload.name, mode, interrupted=interrupted)

    async def ramp(self, workload_at: Callable[[float], Workload], plan: RampPlan) -> BenchResult:
        """Search the highest rate at which the SLO holds, with a workload for each rate. Raises as above."""
        tallies: dict[float, BenchTally] = {}

        async def at(rate: float) -> BenchFigures:
            tally, interrupted = await self._loaded(
                workload_at(rate), f"{rate:.3g} requests/s", self._options.limits
            )
            if interrupted:
                raise asyncio.CancelledError
            tallies[rate] = tally
            figures = figures_of(tally, self._options.slo)
            self._say(
                f"{rate:.3g} requests/s: {figures.slo_share:.0%} met the SLO, TTFT p95 "
                f"{figures.ttft.p95 * 1e3:,.0f} ms, mean ITL p95 {figures.tpot.p95 * 1e3:,.1f} ms"
            )
            return figures

        search = RampSearch(plan, at)
        interrupted = False
        try:
            await search.run()
        except asyncio.CancelledError:
            _uncancel()
            interrupted = True
        ramp = search.found
        shown = tallies.get(ramp.knee) or next(iter(tallies.values()), BenchTally())
        name = workload_at(plan.start).name
        mode = f"open loop, ramp from {plan.start:g} requests/s"
        result = self._result(shown, name, mode, interrupted=interrupted)
        return replace(result, ramp=ramp)

    async def _loaded(self, workload: Workload, step: str, limits: LoadLimits) -> tuple[BenchTally, bool]:
        """Put one workload on the server; return the tally, and whether it was cut short."""
        context = self._server.model.context
        requests = fitting(workload.requests, context, round(self._server.scale.fixed))
        if self._options.api != "embeddings":
            requests = tuple(each for each in requests if not each.embeds)
        if not requests:
            raise ConfigError(f"no request of the workload fits {self._options.api} of {context} tokens")
        if left_out := len(workload.requests) - len(requests):
            self._say(
                f"{left_out} requests are left out: they do not fit {self._options.api} of {context} tokens"
            )
        await self._warm_up(workload.block_tokens, requests)
        tally = BenchTally()
        self.progress = BenchProgress(step, len(requests), tally)
        maker = self._maker(workload.block_tokens)
        endless = limits.concurrency is not None and limits.duration_s < float("inf")
        source: Iterable[WorkloadRequest] = self._rounds(requests, maker) if endless else requests
        try:
            await self._generator(maker).run(source, limits, tally)
        except asyncio.CancelledError:
            _uncancel()
            return tally, True
        return tally, False

    def _rounds(self, requests: Sequence[WorkloadRequest], maker: PromptMaker) -> Iterator[WorkloadRequest]:
        """The requests without end. Each round has other texts, or a cache would hold them."""
        while True:
            yield from requests
            maker.renew(self._rng.getrandbits(64))

    async def _warm_up(self, block_tokens: int, requests: Sequence[WorkloadRequest]) -> None:
        """Send some requests whose texts the measurement does not have."""
        count = self._options.warmup
        if count:
            generator = self._generator(self._maker(block_tokens))
            limits = LoadLimits(concurrency=min(_WARMUP_AT_A_TIME, count))
            await generator.run(islice(cycle(requests), count), limits, BenchTally())

    def _maker(self, block_tokens: int) -> PromptMaker:
        return PromptMaker(self._server.scale, block_tokens, self._rng.getrandbits(64))

    def _generator(self, maker: PromptMaker) -> LoadGenerator:
        server = self._server
        endpoint = HttpEndpoint(self._connections, server.model.name, server.dialect, self._options.more)
        return LoadGenerator(endpoint, self._clock, maker.prompt)

    def _result(self, tally: BenchTally, workload: str, mode: str, *, interrupted: bool) -> BenchResult:
        figures = figures_of(tally, self._options.slo)
        return BenchResult(
            url=self._connections.url,
            model=self._server.model.name,
            api=self._options.api,
            workload=workload,
            mode=mode,
            began=self._options.began,
            slo=self._options.slo,
            figures=figures,
            samples=samples_of(tally),
            course=course_of(tally),
            notes=tuple(notes_on(figures, self._server)),
            interrupted=interrupted,
        )


def fitting(
    requests: tuple[WorkloadRequest, ...], context: int | None, fixed: int
) -> tuple[WorkloadRequest, ...]:
    """The requests that fit a context, with some tokens to spare."""
    if context is None:
        return requests
    room = context - fixed - _LEAST_SPARE
    return tuple(
        each
        for each in requests
        if each.prompt_tokens + max(each.output_tokens, each.prompt_tokens // 50) <= room
    )


def notes_on(figures: BenchFigures, server: ProbedServer) -> Iterable[str]:
    """What limits the figures."""
    for each in server.dialect.left_out():
        yield f"the server refuses {each}"
    if not server.counts_tokens:
        yield "the server does not count prompt tokens: their lengths are estimates"
    elif abs(figures.prompt_token_error) > 0.05:
        yield f"prompts had {figures.prompt_token_error:+.1%} tokens of what was asked for"
    if figures.client_was_late:
        yield (
            f"the load generator was late, by {figures.lateness.p95 * 1e3:.0f} ms at the 95th percentile: "
            "the client was a bottleneck; lower the rate, or run it on more machines"
        )


def _uncancel() -> None:
    """Take back the cancellation by which a user ended the measurement, so that its results can be given."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
