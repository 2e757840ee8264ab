"""How long streams wait while the metrics of many workers are rendered.

The router is the production one, over simulated workers in virtual time, and the page is that of the gateway.
Something else runs in each turn of the event loop, and the longest time between two of its turns counts.
"""

from __future__ import annotations

import asyncio
import time

from tests.kit.gateway.http_edge import models_of

from kvasir_platform.gateway.http.inner_exchange import InnerExchange
from kvasir_platform.gateway.operator.status_page import StatusPages
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from load_tests.report import Row, median
from load_tests.scenarios.gateway.console import deployment_of
from load_tests.scenarios.gateway.fleet.idle import BEGINNING

WORKERS = 200
_SCRAPES = 9


def scrape_row(workers: int = WORKERS) -> Row:
    """The row."""
    value, spread = median(run_virtual(_waits_ms(workers)))
    return Row(
        f"{BEGINNING}metrics of {workers} workers, the longest wait of others",
        value,
        "ms",
        "lower",
        spread=spread,
        note=f"median of {_SCRAPES} scrapes, after one that does not count",
    )


async def _waits_ms(workers: int) -> list[float]:
    spec, clock = deployment_of(workers, 1), VirtualClock()
    cluster, metrics = Cluster(spec, clock), make_metrics(spec)
    await cluster.start()
    try:
        # Makes the metrics read the figures of the router.
        make_gateway(spec, cluster.router, clock, metrics, models_of(spec))
        pages = StatusPages(
            spec,
            lambda: [spec.model.name],
            cluster.router,
            metrics,
            clock,
            in_flight=lambda: cluster.router.in_flight,
            draining=lambda: False,
        )
        return [await _wait_ms(pages) for _ in range(1 + _SCRAPES)][1:]
    finally:
        await cluster.close()


async def _wait_ms(pages: StatusPages) -> float:
    """Return the longest time for which nothing else runs while the page is made."""
    page: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def rendered(status: int, body: bytes, _type: bytes, _headers: bytes) -> None:
        if status == 200:
            page.set_result(body)
        else:
            page.set_exception(RuntimeError(f"the page was answered with {status}: {body[:200]!r}"))

    longest_s, last_s = 0.0, time.perf_counter()
    pages.metrics(InnerExchange("GET", "/metrics", b"", rendered))
    while True:
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        if page.done():
            await page
            return 1e3 * longest_s
        await asyncio.sleep(0)
