"""What the console says of requests that are known in each detail, and what it does by keyboard."""

from __future__ import annotations

from typing import Any

from tests.kit.browser.console_views import figure, lines_of
from tests.kit.browser.tab import Tab

from kvasir.clock import MonotonicClock
from kvasir.core.requests import Usage
from kvasir.ports.router import RequestSummary

MODEL = "kvasir-tiny"
STORY = "Once upon a time there was a router that knew what every worker holds. " * 20
LEGEND = "In the beginning nobody remembered a prompt, and all of it was computed again. " * 40


def console(edge: Any, view: str = "fleet") -> str:
    return f"http://{edge.host}:{edge.port}/console/#/{view}"


def answered(count: int) -> list[RequestSummary]:
    """Requests that ended, with a TTFT of so many hundredths of a second, and a tenth of that as ITL."""
    begun = MonotonicClock().now() - 10.0
    firsts = [begun + number / 100 for number in range(1, count + 1)]
    usage = Usage(prompt_tokens=200, cached_tokens=50, output_tokens=5)
    return [
        RequestSummary(
            f"r{i}", MODEL, "ok", begun, first + 0.4 * (first - begun), first_token_s=first, usage=usage
        )
        for i, first in enumerate(firsts)
    ]


async def test_figures_of_a_minute_count_all_its_requests_and_unknown_ones_are_gaps(
    start: Any, tab: Tab
) -> None:
    edge = await start()
    await tab.open(console(edge))
    assert await figure(tab, "TTFT, median", "none in 60 s") == "–"
    for known in (1, 2):
        edge.router.summaries = answered(100)
        assert await figure(tab, "TTFT, median", "p95 950 ms, 100 in 60 s") == "500 ms"
        assert await figure(tab, "ITL, median", "p95 95.0 ms") == "50.0 ms"
        assert await figure(tab, "prefix hit rate", "of prompts, in 60 s") == "25 %"
        edge.router.summaries = []
        assert await figure(tab, "ITL, median", "none in 60 s") == "–"
        assert await tab.until(lines_of("TTFT, median")) == known
    assert tab.console == []
