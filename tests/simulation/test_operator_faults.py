"""An operator recognizes a fault: the page that the console reads, `kvasir top` and an alert each name it.
The fleet runs in virtual time, and promtool decides which alerts its series fire. Together, the faults move
every series that a dashboard or an alert is about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.kit.browser.recorded_console import recorded_console
from tests.kit.browser.tab import opened_tab
from tests.kit.observability.mix import (
    CERTIFICATE_DAYS,
    FAULTS,
    InjectedFault,
    watched_deployment,
    write_certificate,
)
from tests.kit.observability.promql import metrics_in
from tests.kit.observability.promtool import Watched, chart_alerts, first_firing, moved
from tests.kit.observability.watched_fleet import WatchedFleet, cancelled

from kvasir_platform.dashboards.files import DASHBOARDS
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual

NOW = 1_800_000_000.0
EXPIRES = NOW + CERTIFICATE_DAYS * 86_400.0
CALM_S = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The scrapes, and at the end what `kvasir top` prints, the page of /status and its problems by code."""

    watched: Watched
    top: str
    status: dict[str, Any]

    @property
    def problems(self) -> dict[str, str]:
        return {problem["code"]: problem["text"] for problem in self.status["verdict"]["problems"]}


Watch = Callable[[InjectedFault], Seen]


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """What is seen of a fault, which is injected at the first call."""

    @cache
    def look(fault: InjectedFault) -> Seen:
        certificate = tmp_path_factory.mktemp("tls") / "tls.pem"
        write_certificate(certificate, NOW, EXPIRES)
        return run_virtual(seen(fault, certificate))

    return look


async def seen(fault: InjectedFault, certificate: Path) -> Seen:
    spec = watched_deployment(certificate)
    fleet = WatchedFleet(spec, VirtualClock(), wall_s=NOW, expires_s=EXPIRES)
    await fleet.start()
    first = fleet.scrape()
    await fleet.run(CALM_S)
    assert fleet.status()["verdict"]["ok"], fleet.status()["verdict"]
    before = fleet.scrape()
    await fault.inject(fleet.scene)
    await fleet.run(fault.seconds)
    watched = Watched(first, before, fleet.scrape(), CALM_S, fault.seconds, NOW)
    top, status = fleet.top(), fleet.status()
    await cancelled(asyncio.all_tasks() - {asyncio.current_task()})
    return Seen(watched, top, status)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_console_top_and_an_alert_name_a_fault(
    fault: InjectedFault, watch: Watch, tmp_path: Path
) -> None:
    found = watch(fault)
    assert fault.text in found.problems.get(fault.code, ""), found.problems
    assert fault.text in found.top.replace("\n", " ")
    fired = first_firing(found.watched, tmp_path)
    assert fault.alerts <= fired.keys()
    assert min(fired.values()) >= 0, fired


def test_a_browser_shows_the_text_of_each_fault_in_the_verdict(watch: Watch) -> None:
    pages = [(fault, watch(fault).status) for fault in FAULTS]
    asyncio.run(shown_in_turn(pages))


async def shown_in_turn(pages: Sequence[tuple[InjectedFault, dict[str, Any]]]) -> None:
    async with recorded_console() as console, opened_tab() as tab:
        await tab.open(console.address)
        for fault, status in pages:
            # The deployment's name stands at the top, by which the page is seen to be this fault's.
            await console.show(status | {"deployment": fault.name})
            await tab.until(f"document.querySelector('.brand')?.innerText === 'Kvasir {fault.name}'")
            shown = await tab.until("document.querySelector('.verdict').innerText")
            assert fault.text in shown
            first = status["verdict"]["problems"][0]
            sentence = await tab.until("document.querySelector('.verdict p').innerText")
            assert first["text"].replace("`", "") in sentence
        assert tab.console == []


def test_every_series_of_a_dashboard_or_an_alert_moves_under_a_fault(watch: Watch) -> None:
    expressions = [alert["expr"] for alert in chart_alerts()]
    expressions += [
        query.expression
        for board in DASHBOARDS
        for row in board.rows
        for panel in row.panels
        for query in panel.queries
    ]
    named = {series for text in expressions for series in metrics_in(text)}
    found = set[str]().union(*(moved(watch(fault).watched) for fault in FAULTS))
    assert named - found == set()
