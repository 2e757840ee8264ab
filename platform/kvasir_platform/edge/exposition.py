"""Prometheus' text format from several processes that are one to those who scrape.

Counters and histograms are summed, and so are gauges, which here count what each process has (requests in
flight, bytes held). Of moments, as when a counter was made or a certificate expires, the earliest counts.
What a process had counted when it ended goes on being counted: a sum that fell would be read as a restart of
everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import utils

_CREATED = "_created"
_MOMENTS = (_CREATED, "_timestamp_seconds")


@dataclass(slots=True)
class Family:
    """One metric: its comment lines, its type, and values by series, in the order in which they came."""

    comments: list[str] = field(default_factory=list)
    kind: str = "untyped"
    series: dict[str, float] = field(default_factory=dict)

    def add(self, other: Family) -> None:
        """Take in what another process says of the same metric."""
        for series, value in other.series.items():
            mine = self.series.get(series)
            if mine is None:
                self.series[series] = value
            elif self.kind == "gauge" and series.partition("{")[0].endswith(_MOMENTS):
                self.series[series] = min(mine, value)
            else:
                self.series[series] = mine + value


Families = dict[str, Family]


def parse(text: bytes) -> Families:
    """The families of an exposition as prometheus_client renders it: without timestamps, the comments of each
    before its series."""
    families: Families = {}
    current = Family()
    for line in text.decode().splitlines():
        if line.startswith("# "):
            _, word, name, rest = [*line.split(" ", 3), ""][:4]
            current = families.setdefault(name, Family())
            current.comments.append(line)
            if word == "TYPE":
                current.kind = rest
        elif line:
            series, _, value = line.rpartition(" ")
            current.series[series] = float(value)
    return families


def merged(parts: Iterable[Families]) -> Families:
    """All parts as one."""
    found: Families = {}
    for part in parts:
        for name, family in part.items():
            mine = found.setdefault(name, Family(family.comments, family.kind))
            mine.add(family)
    return found


def lasting(families: Families) -> Families:
    """What stays true when the process that said it has ended: all but gauges."""
    return {
        name: family for name, family in families.items() if family.kind != "gauge" or name.endswith(_CREATED)
    }


def render(families: Families) -> bytes:
    """The text again."""
    lines: list[str] = []
    for family in families.values():
        lines += family.comments
        for series, value in family.series.items():
            shown: str = utils.floatToGoString(value)  # type: ignore[no-untyped-call]
            lines.append(f"{series} {shown}")
    return "".join(f"{line}\n" for line in lines).encode()
