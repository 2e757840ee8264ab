"""What an open console costs a router with many workers and live streams, and how soon it shows something.

The router is the production one, over simulated workers in virtual time. When all streams run, its pages are
rendered as the view of requests has them rendered: once a second, however many people look. The CPU of that
is measured, without the HTTP requests of the viewers, which cost as much as any other.

A browser loads the console of as many workers, each time with an empty cache. It notes when the first view
stands in a frame, in milliseconds since it was asked for the page.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from tests.kit.browser.chromium import chromium
from tests.kit.browser.tab import Tab, opened_tab
from tests.kit.gateway.http_edge import listening, models_of

from kvasir.clock import MonotonicClock
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
from kvasir_platform.gateway.http.inner_exchange import InnerExchange
from kvasir_platform.gateway.operator.requests_page import REQUESTS, RequestPages
from kvasir_platform.gateway.operator.status_page import StatusPages
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
_STATUS = "/status"
_SECONDS = 20
_PROMPT, _OUTPUT, _STEP_S = 48, 1_000, 1.0
_SLO = SloClass("default", 60.0, 5.0)


_NOTED = """new MutationObserver((_, observer) => {
  if (!document.querySelector(".verdict")) return;
  observer.disconnect();
  requestAnimationFrame(() => { window.firstViewMs = performance.now(); });
}).observe(document, { childList: true, subtree: true });"""
"""Runs before the page's own script."""


def console_rows(workers: int = WORKERS, streams: int = STREAMS, ended: int = ENDED) -> list[Row]:
    """The rows of the console. Raise ProcessError if there is no browser."""
    try:
        chromium()
    except AssertionError as error:
        raise ProcessError(f"the console is not measured: {error}") from error
    value, spread = median(run_virtual(_rendered(workers, streams, ended)))
    load_ms, loads_ms = median(asyncio.run(_loaded(workers)))
    return [
        Row(
            f"{BEGINNING}{workers:,} workers and {streams:,} streams",
            value,
            "CPU ms a second",
            "lower",
            target=MOST_MS,
            spread=spread,
            note=f"{_STATUS} and {REQUESTS}, rendered once a second for all viewers; {ended:,} requests have "
            "ended before",
        ),
        Row(
            f"{BEGINNING}until the first view",
            load_ms,
            "ms",
            "lower",
            target=MOST_LOAD_MS,
            spread=loads_ms,
            note=f"median of {LOADS} loads in headless Chromium with an empty cache, after one that does not "
            f"count; {workers:,} workers; browser and gateway share the machine",
        ),
    ]


async def _rendered(workers: int, streams: int, ended: int) -> list[float]:
    """Return the CPU of rendering the pages, in milliseconds, of each of some seconds."""
    spec, clock = deployment_of(workers, streams), VirtualClock()
    cluster = Cluster(spec, clock)
    await cluster.start()
    try:
        await _all(_submitted(cluster, ended, 2))
        live = _submitted(cluster, streams, _OUTPUT)
        await asyncio.gather(*(each.started.wait() for each in live))
        pages = _Pages(spec, cluster, clock)
        taken = []
        for _ in range(_SECONDS):
            await clock.sleep(1.0)
            began = time.process_time()
            pages.render()
            taken.append(1e3 * (time.process_time() - began))
        if cluster.router.in_flight != streams:
            raise RuntimeError(f"{cluster.router.in_flight} of {streams} streams run")
        return taken
    finally:
        for each in cluster.router.running(streams):
            cluster.router.cancel(each.so_far.request_id)
        await cluster.close()


async def _loaded(workers: int) -> list[float]:
    """Return the milliseconds of some loads of the console until its first view."""
    spec, clock = deployment_of(workers, 1), MonotonicClock()
    cluster = Cluster(spec, clock)
    await cluster.start()
    gateway = make_gateway(spec, cluster.router, clock, make_metrics(spec), models_of(spec))
    try:
        with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as folder:
            async with listening(gateway) as at, opened_tab(Path(folder)) as tab:
                await tab.call("Page.addScriptToEvaluateOnNewDocument", source=_NOTED)
                address = f"http://{at.host}:{at.port}/console/"
                return [await _load(tab, address) for _ in range(1 + LOADS)][1:]
    finally:
        await cluster.close()


async def _load(tab: Tab, address: str) -> float:
    await tab.open("about:blank")
    await tab.call("Network.clearBrowserCache")
    await tab.open(address)
    return float(await tab.until("window.firstViewMs"))


class _Pages:
    """The pages of the view that needs most: that of requests."""

    def __init__(self, spec: Deployment, cluster: Cluster, clock: VirtualClock) -> None:
        router = cluster.router
        self._status = StatusPages(
            spec,
            lambda: [spec.model.name],
            router,
            make_metrics(spec),
            clock,
            in_flight=lambda: router.in_flight,
            draining=lambda: False,
        )
        self._requests = RequestPages(router, clock)

    def render(self) -> None:
        """Render each once."""
        for path, show in ((_STATUS, self._status.status), (REQUESTS, self._requests.requests)):
            show(InnerExchange("GET", path, b"", _dropped))


def _dropped(status: int, body: bytes, content_type: bytes, headers: bytes) -> None:
    if status != 200:
        raise RuntimeError(f"a page was answered with {status}: {body[:200]!r}")


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
