"""What an open console costs a router with many workers and live streams, and how soon it shows something.

The router is the production one, over simulated workers in virtual time. When all streams run, virtual time
stops, and a gateway serves the console of that router over real sockets. A browser looks at the view of
requests, which needs the most data. What the process takes beyond a second without viewers is what they cost:
rendering pages, making events of them, and writing these to each viewer.

Then the browser loads the console, each time with an empty cache. It notes when the first view stands in a
frame, in milliseconds since it was asked for the page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import uvloop
from playwright.sync_api import Page
from tests.kit.browser.chromium import chromium
from tests.kit.browser.tab import Tab, opened_tab
from tests.kit.gateway.http_edge import listening, models_of

from kvasir.config.spec.deployment import (
    AdmissionSpec,
    Deployment,
    EngineSpec,
    GatewaySpec,
    PoolSpec,
    RoutingSpec,
    SimSpec,
    SloSpec,
)
from kvasir.core.requests import Request, Role, Sampling, SloClass, token_ids
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from load_tests.report import Row, median
from load_tests.scenarios.gateway.processes import ProcessError

BEGINNING = "console, "
"""How the names of these rows begin."""
WORKERS, STREAMS, ENDED = 200, 10_000, 4_096
"""As many requests have ended before as the router keeps decisions of."""
MOST_MS = 20.0
"""2 % of one core, which so many streams keep busy."""
MOST_LOAD_MS = 1_000.0
"""The longest that an operator should wait for the console."""
LOADS = 5
MORE_VIEWERS = 4
"""Beside the browser's view: a browser opens six connections to a server at most."""
WINDOWS = 3
WINDOW_S = 20.0
"""CPU is counted in windows of many pages, which do not come at the times at which seconds begin."""
_PROMPT, _OUTPUT, _STEP_S = 48, 1_000, 1.0
_SLO = SloClass("default", 60.0, 5.0)
_LISTED = "document.querySelector('[aria-label=\"Running requests\"] tbody tr')"
_MORE = f"""() => {{
  const asked = "/console/live?pages=status,requests";
  window.viewers = Array.from({{ length: {MORE_VIEWERS} }}, () => {{
    const viewer = new EventSource(asked);
    viewer.addEventListener("requests", () => {{ viewer.seen = true; }});
    return viewer;
  }});
}}"""
_ALL_SEE = "window.viewers.every((viewer) => viewer.seen)"

_NOTED = """new MutationObserver((_, observer) => {
  if (!document.querySelector(".verdict")) return;
  observer.disconnect();
  requestAnimationFrame(() => { window.firstViewMs = performance.now(); });
}).observe(document, { childList: true, subtree: true });"""
"""Runs before the page's own script."""


def console_rows(
    workers: int = WORKERS,
    streams: int = STREAMS,
    ended: int = ENDED,
    *,
    windows: int = WINDOWS,
    window_s: float = WINDOW_S,
    loads: int = LOADS,
) -> list[Row]:
    """The rows of the console. Raise ProcessError if there is no browser."""
    try:
        chromium()
    except AssertionError as error:
        raise ProcessError(f"the console is not measured: {error}") from error
    looks = _Looks(windows, window_s, loads)
    found = run_virtual(_watched(workers, streams, ended, looks))
    load_ms, loads_ms = median(found.loads_ms)
    fleet = f"{BEGINNING}{workers:,} workers and {streams:,} streams"
    return [
        _cpu_row(
            fleet, found.one_ms, f"one browser at the view of requests; {ended:,} requests have ended before"
        ),
        _cpu_row(f"{fleet}, {1 + MORE_VIEWERS} viewers", found.more_ms, "the same pages, to each viewer"),
        Row(
            f"{BEGINNING}until the first view",
            load_ms,
            "ms",
            "lower",
            target=MOST_LOAD_MS,
            spread=loads_ms,
            note=f"median of {loads} loads in headless Chromium with an empty cache, after one that does not "
            "count; browser and gateway share the machine",
        ),
    ]


def _cpu_row(name: str, taken_ms: Sequence[float], note: str) -> Row:
    value, spread = median(taken_ms)
    return Row(name, value, "CPU ms a second", "lower", target=MOST_MS, spread=spread, note=note)


class _Looks(NamedTuple):
    """How often and how long is looked."""

    windows: int
    window_s: float
    loads: int


class _Measured(NamedTuple):
    """In milliseconds: CPU a second in each window, with one viewer and with several, and times until the
    first view."""

    one_ms: list[float]
    more_ms: list[float]
    loads_ms: list[float]


async def _watched(workers: int, streams: int, ended: int, looks: _Looks) -> _Measured:
    """Look at the console of so many streams."""
    clock = _StoppedClock()
    spec = deployment_of(workers, streams)
    cluster = Cluster(spec, clock)
    await cluster.start()
    try:
        await _all(_submitted(cluster, ended, 2))
        live = _submitted(cluster, streams, _OUTPUT)
        await asyncio.gather(*(each.started.wait() for each in live))
        if cluster.router.in_flight != streams:
            raise RuntimeError(f"{cluster.router.in_flight} of {streams} streams run")
        # There are no sockets in virtual time: its loop waits, while a thread has one with them.
        with clock.stopped(), ThreadPoolExecutor(1) as thread:
            return thread.submit(_on_sockets, spec, cluster, looks).result()
    finally:
        for each in cluster.router.running(streams):
            cluster.router.cancel(each.so_far.request_id)
        await cluster.close()


def _on_sockets(spec: Deployment, cluster: Cluster, looks: _Looks) -> _Measured:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_viewed(spec, cluster, looks))


async def _viewed(spec: Deployment, cluster: Cluster, looks: _Looks) -> _Measured:
    gateway = make_gateway(spec, cluster.router, cluster.clock, make_metrics(spec), models_of(spec))
    async with listening(gateway) as at, opened_tab() as tab:
        idle, _ = median(await _taken(looks))
        await tab.call(lambda page: page.add_init_script(_NOTED))
        address = f"http://{at.host}:{at.port}/console/"
        await tab.open(f"{address}#/requests")
        await tab.until(_LISTED)
        one = await _taken(looks)
        await tab.call(lambda page: page.evaluate(_MORE))
        await tab.until(_ALL_SEE)
        more = await _taken(looks)
        loads_ms = [await _load(tab, address) for _ in range(1 + looks.loads)][1:]
    return _Measured([each - idle for each in one], [each - idle for each in more], loads_ms)


async def _taken(looks: _Looks) -> list[float]:
    """Return the CPU of this process in the next windows, in milliseconds a second."""
    taken = []
    for _ in range(looks.windows):
        began = time.process_time()
        await asyncio.sleep(looks.window_s)
        taken.append(1e3 * (time.process_time() - began) / looks.window_s)
    return taken


class _StoppedClock(VirtualClock):
    """Virtual time, which can be read in other loops while it is stopped: there it goes on as real time."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop virtual time until the block ends."""
        self._ahead_s = super().now() - time.monotonic()
        try:
            yield
        finally:
            self._ahead_s = None

    def now(self) -> float:
        """Seconds since the virtual loop was made."""
        return super().now() if self._ahead_s is None else self._ahead_s + time.monotonic()


def _forget(page: Page) -> None:
    """Empty the browser's cache."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("Network.clearBrowserCache")
    devtools.detach()


async def _load(tab: Tab, address: str) -> float:
    await tab.open("about:blank")
    await tab.call(_forget)
    await tab.open(address)
    return float(await tab.until("window.firstViewMs"))


def deployment_of(workers: int, streams: int) -> Deployment:
    """Simulated workers that run that many streams together."""
    most = max(streams, ENDED)
    engine = EngineSpec(
        kind="sim",
        block_size=16,
        max_num_seqs=1024,
        kv_cache_bytes=256 << 20,
        sim=SimSpec(prefill_tokens_per_s=1e6, decode_step_s=_STEP_S, decode_step_per_seq_s=0.0),
    )
    return Deployment(
        disaggregation="never",
        pools=(PoolSpec(name="both", role=Role.BOTH, replicas=workers, engine=engine),),
        admission=AdmissionSpec(patience=0.0),
        routing=RoutingSpec(max_in_flight=most, max_queue=most),
        slo=(SloSpec(name=_SLO.name, ttft_s=_SLO.ttft_s, itl_s=_SLO.itl_s),),
        gateway=GatewaySpec(port=0),
    )


def _submitted(cluster: Cluster, count: int, output: int) -> list[ClientStream]:
    """Submit that many requests, all different."""
    sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
    made = []
    for number in range(count):
        tokens = token_ids([2 + (number * 7 + each) % 200 for each in range(_PROMPT)])
        request = Request(
            f"{output}-{number}",
            cluster.deployment.model.name,
            tokens,
            sampling,
            arrival_s=cluster.clock.now(),
            tenant=f"tenant-{number % 10}",
            slo=_SLO,
        )
        made.append(ClientStream(request))
        cluster.router.submit(request, made[-1])
    return made


async def _all(streams: list[ClientStream]) -> None:
    for each in streams:
        await each.finished()
