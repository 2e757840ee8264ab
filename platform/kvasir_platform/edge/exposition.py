"""Merges the Prometheus text format of several processes that are scraped as one.

Counters, histograms and gauges are summed; gauges here are counts of each process (requests in flight, bytes
held). For timestamps, such as when a counter was created or a certificate expires, the earliest is used.
Counters of a process that ended are kept, since Prometheus reads a falling sum as a counter reset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from prometheus_client import utils

_CREATED = "_created"
_MOMENTS = (_CREATED, "_timestamp_seconds")


@dataclass(slots=True)
class Family:
    """One metric: its comment lines, its type, and values by series, in insertion order."""

    comments: list[str] = field(default_factory=list)
    kind: str = "untyped"
    series: dict[str, float] = field(default_factory=dict)

    def add(self, other: Family) -> None:
        """Merge the same metric of another process."""
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
    """Parse an exposition as prometheus_client renders it: without timestamps, the comments of each metric
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
    """Merge all expositions."""
    found: Families = {}
    for part in parts:
        for name, family in part.items():
            mine = found.setdefault(name, Family(family.comments, family.kind))
            mine.add(family)
    return found


def merged_parts(parts: Sequence[Families]) -> Iterator[bytes]:
    """Yield the text format of all expositions, merged, metric by metric."""
    for name in dict.fromkeys(chain.from_iterable(parts)):
        yield render(merged({name: part[name]} for part in parts if name in part))


def lasting(families: Families) -> Families:
    """Return the families that outlive their process: all except gauges."""
    return {
        name: family for name, family in families.items() if family.kind != "gauge" or name.endswith(_CREATED)
    }


def render(families: Families) -> bytes:
    """Render the text format."""
    lines: list[str] = []
    for family in families.values():
        lines += family.comments
        for series, value in family.series.items():
            shown: str = utils.floatToGoString(value)  # type: ignore[no-untyped-call]
            lines.append(f"{series} {shown}")
    return "".join(f"{line}\n" for line in lines).encode()
