"""Measures what clients notice of each loss that a cluster brings, into load_tests/reports/cluster.json.

Under a load of streams whose every token is known beforehand. Network namespaces need root and iproute2;
losses of releases start Ray, and some of them real engines.

    make bench-cluster
    make bench-cluster ARGS="--only cut,drain"
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import uvloop

from load_tests.report import REPORTS, Row, merged, read, write
from load_tests.scenarios.cluster import real
from load_tests.scenarios.cluster.certificates import Renewals, renewed_under_load
from load_tests.scenarios.cluster.nodes import RESUME_WINDOW_S, Cut, Drained, cut_off, drained
from load_tests.scenarios.cluster.releases import Upgrade, never_starts, redis_without_data, two_in_a_row
from load_tests.scenarios.scorecard.common import Figure, Trial

LOSSES: Mapping[str, tuple[str, Callable[[Trial], Awaitable[list[Figure]]]]] = {
    "cut": (
        "a node's network is cut while its processes live",
        lambda trial: cut_off(trial, Cut()),
    ),
    "returns": (
        "a node comes back after its replica was replaced, while it keeps its session",
        lambda trial: cut_off(trial, Cut(replaced=True)),
    ),
    "returns-late": (
        "a node comes back after its replica was replaced, when its session has ended",
        lambda trial: cut_off(trial, Cut(replaced=True, cut_s=RESUME_WINDOW_S + 4.0)),
    ),
    "drain": (
        "a drain of the node with the only decode replica",
        lambda trial: drained(trial, Drained()),
    ),
    "upgrades": ("two upgrades in a row", lambda trial: two_in_a_row(trial, Upgrade())),
    "rollback": (
        "an upgrade whose image never starts, and its rollback",
        lambda trial: never_starts(trial, Upgrade()),
    ),
    "redis-without-data": (
        "Redis restarts without a volume",
        lambda trial: redis_without_data(trial, Upgrade()),
    ),
    "certificates": (
        "certificates are renewed",
        lambda trial: renewed_under_load(trial, Renewals()),
    ),
    "head": (
        "real engines: Ray's head is killed ten times",
        lambda trial: real.head_killed(trial, real.Loss()),
    ),
    "redis": (
        "real engines: Redis restarts with its volume",
        lambda trial: real.redis_restarted(trial, real.Loss()),
    ),
    "drain-real": (
        "real engines: a drain of the node with the only decode replica",
        lambda trial: real.drained(trial, real.Loss()),
    ),
    "rollback-real": (
        "real engines: an upgrade whose image never starts, and its rollback",
        lambda trial: real.never_starts(trial, Upgrade(load=real.Loss().load)),
    ),
}


def measure(name: str, seed: int) -> list[Row]:
    """Measure one loss. Any failure becomes its row."""
    title, act = LOSSES[name]

    async def run(folder: str) -> list[Figure]:
        return await act(Trial(Path(folder), seed))

    with tempfile.TemporaryDirectory(prefix="kvasir-cluster-") as folder:
        try:
            figures = uvloop.run(run(folder))
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - the others are still measured
            note = f"{type(error).__name__}: {error}"[:500]
            return [Row(title, 1.0, "failures", "lower", target=0.0, note=note, seeds=(seed,))]
    made = partial(Row, seeds=(seed,))
    return [
        made(f"{title}: {each.what}", each.value, each.unit, each.better, target=each.target, note=each.note)
        for each in figures
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"some losses, as in cut,drain (all: {','.join(LOSSES)})")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and arrivals (1)")
    parser.add_argument("--no-report", action="store_true", help="show figures and write nothing")
    args = parser.parse_args(argv)
    names = list(LOSSES) if args.only is None else args.only.split(",")
    if unknown := [each for each in names if each not in LOSSES]:
        parser.error(f"no such loss: {', '.join(unknown)}; there are {', '.join(LOSSES)}")
    found: list[Row] = []
    for name in names:
        began = time.monotonic()
        print(f"{name}: {LOSSES[name][0]}", flush=True)
        rows = measure(name, args.seed)
        for row in rows:
            met = {True: "met", False: "NOT MET", None: ""}[row.met]
            print(f"    {row.name}: {row.value:.4g} {row.unit} {met}\n        {row.note}", flush=True)
        print(f"    {time.monotonic() - began:.0f} s", flush=True)
        found += rows
        if not args.no_report:
            write("cluster", "make bench-cluster", merged(read(REPORTS / "cluster.json"), rows))
    return 1 if any(row.met is False for row in found) else 0
