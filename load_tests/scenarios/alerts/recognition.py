"""How soon a fault is named: a real Prometheus scrapes a fleet in real time, and each fault is injected once.

    make bench-alerts
    make bench-alerts ARGS='--only "cold cache"'

The chart's alerts look back over minutes to a day, and wait for minutes. Here all windows and waits are 1/30
of that, and Prometheus scrapes once a second, so that a fault takes a minute and not half an hour. The
expressions of dashboards are evaluated before each fault, and every few seconds after it. Figures go to
reports/alerts.json.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kit.observability.mix import FAULTS, InjectedFault, watched_deployment, write_certificate
from tests.kit.observability.prometheus import PrometheusServer, prometheus
from tests.kit.observability.promtool import chart_alerts, rules
from tests.kit.observability.watched_fleet import WatchedFleet

from kvasir.clock import MonotonicClock
from kvasir_platform.dashboards.files import DASHBOARDS
from load_tests.report import Row, write

COMMAND = "python -m load_tests.scenarios.alerts"
SCALE = 1 / 30
_VALID_S = 60 * 86_400.0
_CALM_S = 25.0
_MOST_S = 90.0
_POLL_S = 0.25
_LATE_READINGS, _READ_EVERY_S = 3, 3.0
"""Readings of expressions after the alerts of a fault, as some move late."""
_MOVED = 0.05


@dataclass(frozen=True, slots=True)
class Recognized:
    """A fault: the seconds until each alert fired, and until /status named it; the expressions of dashboards
    that have a value, and those whose value changed."""

    fault: str
    alert: str
    alerts: dict[str, float]
    named_s: float | None
    shown: frozenset[str]
    moved: frozenset[str]


def expressions() -> list[str]:
    """The expressions of all dashboards, as Grafana asks them for all models and pools."""
    texts = {
        query.expression
        for board in DASHBOARDS
        for row in board.rows
        for p in row.panels
        for query in p.queries
    }
    return sorted(
        re.sub(r"\$(?:job|model|pool|tenant)", ".*", text.replace("$__rate_interval", "10s"))
        for text in texts
    )


async def recognize(fault: InjectedFault, folder: Path) -> Recognized:
    """Inject a fault into a fleet of its own, and watch until its alert fires. Raises TimeoutError if it does
    not."""
    now, certificate = time.time(), folder / "tls.pem"
    write_certificate(certificate, now, now + _VALID_S)
    fleet = WatchedFleet(
        watched_deployment(certificate), MonotonicClock(), wall_s=now, expires_s=now + _VALID_S
    )
    await fleet.start()
    late_s = _LATE_READINGS * _READ_EVERY_S
    traffic = asyncio.create_task(fleet.run(_CALM_S + _MOST_S + late_s))
    try:
        async with (
            scraped(fleet) as target,
            prometheus(folder, target, rules(chart_alerts(), SCALE)) as server,
        ):
            await asyncio.sleep(_CALM_S)
            if early := await server.firing():
                raise RuntimeError(f"before {fault.name}: {', '.join(early)}")
            before = await _values(server)
            began = time.monotonic()
            await fault.inject(fleet.scene)
            ended = asyncio.Event()
            changes = asyncio.create_task(_changes(server, before, ended))
            try:
                alerts, named_s = await _watch(fault, fleet, server, began)
            except BaseException:
                changes.cancel()
                raise
            ended.set()
            shown, moved = await changes
    finally:
        for task in (traffic, *fleet.scene.going_on):
            task.cancel()
        await asyncio.gather(traffic, *fleet.scene.going_on, return_exceptions=True)
        await fleet.close()
    return Recognized(fault.name, fault.alert, alerts, named_s, shown, moved)


async def _changes(
    server: PrometheusServer, before: dict[str, dict[str, float]], ended: asyncio.Event
) -> tuple[frozenset[str], frozenset[str]]:
    """The expressions that have a value, and those whose value differs from that before the fault, until a
    little after `ended` is set."""
    shown, moved = {text for text in before if before[text]}, set[str]()
    late = 0
    while late < _LATE_READINGS:
        await asyncio.sleep(_READ_EVERY_S)
        late += ended.is_set()
        for text, values in (await _values(server)).items():
            if values or before[text]:
                shown.add(text)
                moved |= {text} if _moved(before[text], values) else set()
    return frozenset(shown), frozenset(moved)


async def _watch(
    fault: InjectedFault, fleet: WatchedFleet, server: PrometheusServer, began: float
) -> tuple[dict[str, float], float | None]:
    alerts: dict[str, float] = {}
    named_s: float | None = None
    async with asyncio.timeout(_MOST_S):
        while not fault.alerts <= alerts.keys() or named_s is None:
            await asyncio.sleep(_POLL_S)
            now = time.monotonic() - began
            for name in await server.firing():
                alerts.setdefault(name, now)
            problems = fleet.status()["verdict"]["problems"]
            if named_s is None and any(
                fault.code == each["code"] and fault.text in each["text"] for each in problems
            ):
                named_s = now
    return alerts, named_s


@asynccontextmanager
async def scraped(fleet: WatchedFleet) -> AsyncIterator[str]:
    """Serve the metrics of a fleet; yield host:port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = fleet.figures()
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}\r\n"
        )
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


async def _values(server: PrometheusServer) -> dict[str, dict[str, float]]:
    return {text: await server.query(text) for text in expressions()}


def _moved(before: dict[str, float], after: dict[str, float]) -> bool:
    if before.keys() != after.keys():
        return True
    return any(abs(after[each] - was) > _MOVED * abs(was) for each, was in before.items())


def report_rows(found: Sequence[Recognized]) -> list[Row]:
    """The rows of a report."""
    rows = []
    scaled = f"windows and waits of alerts are 1/{round(1 / SCALE)} of the chart's, scraped once a second"
    for each in found:
        first = min(each.alerts, key=lambda name: each.alerts[name])
        then = "" if first == each.alert else f"; {each.alert} after {each.alerts[each.alert]:.1f} s"
        others = sorted(set(each.alerts) - {first, each.alert})
        also = f"; also {', '.join(others)}" if others else ""
        rows.append(
            Row(f"{each.fault}: until the first alert", round(each.alerts[first], 2), "s", "lower",
                note=f"{first}{then}{also}; {scaled}")
        )  # fmt: skip
        if each.named_s is not None:
            rows.append(Row(f"{each.fault}: until /status names it", round(each.named_s, 2), "s", "lower"))
    every = expressions()
    shown, moved = (set().union(*(getattr(each, name) for each in found)) for name in ("shown", "moved"))
    rows.append(_of("expressions of dashboards that had a value", shown, every))
    rows.append(_of("expressions of dashboards that a fault moved", moved, every))
    return rows


def _of(what: str, found: set[str], every: Sequence[str]) -> Row:
    without = sorted({name for text in set(every) - found for name in re.findall(r"kvasir_\w+", text)})
    note = f"of {len(every)}; not: {', '.join(without)}" if without else f"of {len(every)}"
    return Row(what, len(found), "expressions", "higher", target=len(every), note=note)


async def measure(faults: Sequence[InjectedFault]) -> list[Recognized]:
    """Inject each fault."""
    found = []
    for fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            found.append(await recognize(fault, Path(folder)))
        alerts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found[-1].alerts.items())
        sys.stderr.write(f"{fault.name}: {alerts}\n")
    return found


def main() -> None:
    """Read the options, measure, and write or print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {each.name: each for each in FAULTS}
    parser.add_argument("--only", choices=known, help="one fault, which is not written to the report")
    args = parser.parse_args()
    faults = list(known.values()) if args.only is None else [known[args.only]]
    rows = report_rows(asyncio.run(measure(faults)))
    if args.only is None:
        sys.stdout.write(f"{write('alerts', COMMAND, rows)}\n")
    else:
        sys.stdout.write(
            "\n".join(f"{row.name}: {row.value:g} {row.unit}; {row.note}" for row in rows) + "\n"
        )
