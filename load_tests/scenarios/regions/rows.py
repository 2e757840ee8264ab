"""The report rows of a day over five regions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from load_tests.report import Row
from load_tests.scenarios.regions.results import DayFigures
from load_tests.scenarios.regions.selection import OURS
from load_tests.scenarios.regions.world import METERED_PER_MIN, PROMISED_ITL_S, PROMISED_TTFT_S, REGIONS


def rows_of(found: Mapping[str, DayFigures], seed: int) -> list[Row]:
    """The rows, ours first. The peer of each of ours is the best of those that do not use Kvasir's
    decision."""
    rows: list[Row] = []
    for who, day in found.items():
        rows += _of(who, day)
    ours, peers = found[OURS], [day for who, day in found.items() if not who.startswith(OURS)]
    if peers:
        rows = [_with_peer(row, ours, peers) for row in rows]
    rows += _kept(ours)
    return [replace(row, seeds=(seed,)) for row in rows]


def _of(who: str, day: DayFigures) -> list[Row]:
    most = ", ".join(map(str, day.replicas))
    return [
        Row(
            f"cost of a day, {who}",
            day.dollars,
            "$",
            "lower",
            note=f"at most {most} replicas ({', '.join(each.name for each in REGIONS)})",
        ),
        Row(f"TTFT p99, {who}", day.p99_s, "s", "lower", note=f"p50 {day.p50_s:.2f} s"),
        Row(f"TTFT p99 as an outage begins, {who}", day.outage_p99_s, "s", "lower"),
        Row(f"wait p99, {who}", day.wait_p99_s, "s", "lower", note="the TTFT without the prompt's own time"),
        Row(
            f"requests that met the promise, {who}",
            100 * day.met,
            "%",
            "higher",
            note=f"{day.failed} of {day.requests:,} fail; TTFT {PROMISED_TTFT_S:g}, ITL {PROMISED_ITL_S:g}",
        ),
        Row(f"requests in another region, {who}", 100 * day.cross, "%", "lower"),
    ]


def _with_peer(row: Row, ours: DayFigures, peers: list[DayFigures]) -> Row:
    """Compare our cost, p99 and goodput with the best of the others, each by itself."""
    best = {
        f"cost of a day, {OURS}": min(day.dollars for day in peers),
        f"TTFT p99, {OURS}": min(day.p99_s for day in peers),
        f"wait p99, {OURS}": min(day.wait_p99_s for day in peers),
        f"requests that met the promise, {OURS}": 100 * max(day.met for day in peers),
    }.get(row.name)
    if best is None:
        return row
    return replace(row, peer=best, ratio=row.value / best if best else None, target_ratio=1.0)


def _kept(ours: DayFigures) -> list[Row]:
    """What must hold."""
    return [
        Row("requests outside of their tenant's regions", ours.violations, "", "lower", target=0),
        Row(
            "requests executed in two regions at a time",
            ours.doubles,
            "",
            "lower",
            target=0,
            note=f"{ours.repeated} were repeated after an outage, {ours.unheard} of which had ended unheard",
        ),
        Row(
            "shared limit, the worst hour",
            ours.worst_hour,
            "of the limit",
            "lower",
            peer=ours.alone_hour,
            ratio=ours.worst_hour / ours.alone_hour if ours.alone_hour else None,
            note=f"{METERED_PER_MIN:,} tokens a minute; the peer is a limit that each cell counts by itself",
        ),
        Row(
            "shared limit, the worst minute beyond its bound",
            max(0.0, ours.excess),
            "tokens",
            "lower",
            target=0,
        ),
    ]
