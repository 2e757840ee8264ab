"""Measures ITL with two engines on two CPUs by how their OpenMP threads wait, into
load_tests/reports/threads.json.

    make bench-threads ARGS="--rounds 3"

Real vLLM, behind a router, on an otherwise idle machine: everything runs on the same two CPUs. The variants
alternate, each round with engines of its own. `default` is what libgomp does without OMP_WAIT_POLICY: its
threads spin for a while. Two threads for each engine are what a pod on two CPUs has, one is its share under
`kvasir up`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import uvloop
from tests.kit.lab.load import asks, closed_loop, quantile
from tests.kit.lab.stream import Outcome

from kvasir.config.spec.deployment import EngineSpec
from load_tests.report import REPORTS, Row, median, merged, read, write
from load_tests.scenarios.scorecard import real_engines
from load_tests.scenarios.threads.worker import DEFAULT, VARIABLE

ENGINES, CPUS = 2, 2
PROMPT_TOKENS = 64
STREAMS = (1, 8)


@dataclass(frozen=True, slots=True)
class Variant:
    """How threads wait, and how many each engine has."""

    policy: str
    threads: int

    def __str__(self) -> str:
        return f"OMP_WAIT_POLICY {self.policy}, {self.threads} thread{'s' * (self.threads > 1)} an engine"


VARIANTS = (
    Variant(DEFAULT, 2),
    Variant("ACTIVE", 2),
    Variant("PASSIVE", 2),
    Variant("PASSIVE", 1),
)


@dataclass(slots=True)
class Gaps:
    """ITL p50, p99 and longest gap of each round, in seconds, and tokens a second."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Add a round. Raise RuntimeError for a stream that failed."""
        if failed := [each for each in outcomes if each.error]:
            raise RuntimeError(f"{len(failed)} streams failed: {failed[0].error} {failed[0].detail}")
        gaps = [
            after - before
            for each in outcomes
            for before, after in zip(each.times_s, each.times_s[1:], strict=False)
        ]
        self.p50.append(quantile(gaps, 0.5))
        self.p99.append(quantile(gaps, 0.99))
        self.longest.append(max(gaps))
        took = max(each.times_s[-1] for each in outcomes) - min(each.sent_s for each in outcomes)
        self.rate.append(sum(each.ask.tokens for each in outcomes) / took)


Found = dict[tuple[Variant, int], Gaps]


async def one_round(variant: Variant, folder: Path, tokens: int, found: Found) -> None:
    """Start the engines, and measure each number of streams."""
    engine = EngineSpec(kind="vllm", block_size=32, kv_cache_bytes=64 << 20, threads=variant.threads)
    deployment = real_engines.together(engine)
    pools = ("both",) * ENGINES
    programs = {"both": "load_tests.scenarios.threads.worker"}
    async with real_engines.stage(folder, deployment, pools, {VARIABLE: variant.policy}, programs) as stage:
        work = asks(Random(7), PROMPT_TOKENS, tokens)
        # The first steps of an engine allocate.
        await closed_loop(stage.address, [next(work) for _ in range(4)], 4, stage.clock)
        for streams in STREAMS:
            some = [next(work) for _ in range(max(4, 2 * streams))]
            outcomes = await closed_loop(stage.address, some, streams, stage.clock)
            found.setdefault((variant, streams), Gaps()).add(outcomes)


def rows(found: Found) -> list[Row]:
    """The report's rows: medians over rounds."""
    made = []
    for (variant, streams), gaps in found.items():
        name = f"{streams} stream{'s' * (streams > 1)}, {variant}"
        for what, samples in (("ITL p50", gaps.p50), ("ITL p99", gaps.p99), ("longest gap", gaps.longest)):
            value, spread = median([each * 1000 for each in samples])
            made.append(Row(f"{name}: {what}", value, "ms", "lower", spread=spread))
        value, spread = median(gaps.rate)
        made.append(Row(f"{name}: output", value, "tokens/s", "higher", spread=spread))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="starts of each variant (3)")
    parser.add_argument("--tokens", type=int, default=300, help="output of each stream (300)")
    parser.add_argument("--no-report", action="store_true", help="only print")
    args = parser.parse_args(argv)
    usable = sorted(os.sched_getaffinity(0))[:CPUS]
    # Inherited by the router and the engines.
    os.sched_setaffinity(0, usable)
    found: Found = {}
    for number in range(args.rounds):
        for variant in VARIANTS:
            sys.stderr.write(f"round {number + 1} of {args.rounds}: {variant}\n")
            with tempfile.TemporaryDirectory(prefix="kvasir-threads-") as folder:
                uvloop.run(one_round(variant, Path(folder), args.tokens, found))
    made = rows(found)
    for row in made:
        print(f"{row.name}: {row.value:.4g} {row.unit} {row.spread}")
    if not args.no_report:
        print(write("threads", "make bench-threads", merged(read(REPORTS / "threads.json"), made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
