"""An operator recognizes a fault: the page that the console reads, `kvasir top` and an alert each name it.
The fleet runs in virtual time, and promtool decides which alerts its series fire. Together, the faults move
every series that a dashboard or an alert is about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
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
    """The scrapes, what `kvasir top` prints at the end, and the problems of /status by code."""

    watched: Watched
    top: str
    problems: dict[str, str]


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
    top, problems = fleet.top(), fleet.status()["verdict"]["problems"]
    await cancelled(asyncio.all_tasks() - {asyncio.current_task()})
    return Seen(watched, top, {problem["code"]: problem["text"] for problem in problems})


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
