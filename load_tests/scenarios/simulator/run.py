"""The speed of the simulator, whether its runs replay exactly, policies beside the fluid bound, and the time
of plans.

make bench-sim
make bench-sim ARGS="--only plan" the time of plans; other rows of the report are kept
make bench-sim ARGS=--quick       smaller fleets and fewer seeds, without a report
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from io import StringIO
from multiprocessing import get_context
from random import Random

from kvasir.core.requests import Role, SloClass
from kvasir.hardware.offers import catalogue
from kvasir.sizing.shape import EngineShape
from kvasir_platform.capacity.engines import engine_option, gpu_choice
from kvasir_platform.capacity.models import known_model
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.showcase.command import run_all
from kvasir_platform.cli.sim.read import replica_of
from kvasir_platform.sim.engine.options import BatchOptions
from kvasir_platform.sim.server.compare import PolicyComparison, RateSearch, compare
from kvasir_platform.sim.server.results import ServerResult
from kvasir_platform.sim.server.server import ServerSimulation
from kvasir_platform.sim.server.setting import (
    FleetFault,
    FleetFaultKind,
    ServerSetting,
    SimulatedPool,
    with_blocks,
)
from kvasir_platform.workload.files import open_workload
from kvasir_platform.workload.requests import Workload
from kvasir_router.decide import POLICIES
from load_tests.report import REPORTS, Row, read, write
from load_tests.scenarios.simulator.plans import BEGINNING, plan_rows

SEEDS = 1_000
SMALL, LARGE, HOUR_S, TEN_MINUTES_S = 16, 1_000, 3600.0, 600.0
RATE_EACH = 0.06
"""Requests per second of a worker: a third of what it could serve within the SLO."""
LONG = (
    "chat:rate={rate},duration={seconds},prompt=6000/24000,output=300/900,context=60000,prefix=4096,"
    "prefixes=50,turns=4,think=20,block=512"
)
SLO = SloClass("long", ttft_s=5.0, itl_s=0.05)
COMPARED = ("chat", "rag", "agents")
POLICY_RATE = 20.0


def pool_of(model: str, ranks: int, workers: int, block: int) -> SimulatedPool:
    """A pool of workers on H100 that do both parts."""
    known = known_model(model)
    gpu = next(each for each in catalogue() if each.name == "H100")
    assert known is not None
    shape = EngineShape(max_model_len=65_536, max_num_seqs=256, max_num_batched_tokens=8192, tensor=ranks)
    option = engine_option(known, gpu_choice(gpu), shape)
    return SimulatedPool("both", Role.BOTH, workers, replica_of(option, BatchOptions(), block))


def long_setting(workers: int, seconds: float, each: float) -> ServerSetting:
    """Long conversations on 70B, four GPUs a worker."""
    pool = pool_of("llama-3.1-70b", 4, workers, 512)
    workload = open_workload(LONG.format(rate=each * workers, seconds=seconds), Random(1))
    return ServerSetting(with_blocks(workload, (pool,)), (pool,), disaggregation="never", slo=SLO)


def timed(setting: ServerSetting) -> ServerResult:
    """Run, and print progress."""

    def tell(share: float) -> None:
        if round(share * 100) % 10 == 0:
            say(f"{share:.0%}")

    return ServerSimulation(setting, clock=time.perf_counter, tell=tell).run()


def small_fleet(seconds: float, each: float) -> Row:
    """Sixteen workers."""
    result = timed(long_setting(SMALL, seconds, each))
    note = (
        f"70B on four H100 each, long conversations at {each * SMALL:.1f} requests/s, {result.requests:,} "
        f"requests, "
        f"{result.decisions:,} production decisions, utilization {result.utilization:.0%}"
    )
    return Row(f"virtual seconds per second, {SMALL} workers", result.speed, "x", "higher", 100.0, note=note)


def large_fleet(workers: int, seconds: float) -> Row:
    """An hour on a thousand workers."""
    setting = long_setting(workers, seconds, RATE_EACH)
    result = timed(setting)
    mean = setting.workload.prompt_tokens / result.requests
    note = (
        f"70B on four H100 each, {result.requests:,} requests of {mean:,.0f} prompt tokens on average at "
        f"{RATE_EACH * workers:.0f} requests/s, utilization {result.utilization:.0%}, hit rate "
        f"{result.hit_rate:.0%}; "
        "the run itself, without generating the requests"
    )
    name = (
        f"an hour on {workers:,} workers" if seconds == HOUR_S else f"{seconds:.0f} s on {workers:,} workers"
    )
    return Row(name, result.real_s, "s", "lower", TEN_MINUTES_S, note=note)


def figures(seed: int) -> str:
    """All times of a small run with a fault, as text."""
    pool = pool_of("llama-3.1-8b", 1, 3, 64)
    kinds = tuple(FleetFaultKind)
    fault = FleetFault(1.0 + seed % 5, kinds[seed % len(kinds)], seed, lasts_s=2.0)
    workload = with_blocks(open_workload("agents:rate=10,duration=6", Random(seed)), (pool,))
    setting = ServerSetting(workload, (pool,), disaggregation="never", seed=seed, faults=(fault,))
    result = ServerSimulation(setting, clock=lambda: 0.0).run()
    times = result.times
    return repr((times.ttft_s, times.tpot_s, times.e2e_s, times.cached, result.failovers, result.decisions))


def equal(seed: int) -> bool:
    """Whether a seed gives the same run twice."""
    return figures(seed) == figures(seed)


def policies(preset: str, processes: ProcessPoolExecutor, *, quick: bool) -> list[Row]:
    """Every policy on one preset, four workers with 8B."""
    names = ("cost", "round_robin") if quick else tuple(POLICIES)
    seconds, search = (3.0, RateSearch(runs=4)) if quick else (20.0, RateSearch())
    runs = {name: processes.submit(_one_policy, preset, name, seconds, search) for name in names}
    found = {name: run.result() for name, run in runs.items()}
    bound = next(iter(found.values())).bound
    ranks = {name: each.ranks[0] for name, each in found.items()}
    best = max((name for name in names if name != "cost"), key=lambda name: ranks[name].goodput)
    rows = []
    for name in sorted(names, key=lambda name: -ranks[name].goodput):
        note = f"{ranks[name].goodput:.1f} of {bound.requests_per_s:.1f} requests/s"
        row = Row(
            f"goodput of the fluid bound, {preset}, {name}", ranks[name].of_bound, "", "higher", note=note
        )
        if name == "cost":
            ratio = ranks[name].goodput / ranks[best].goodput if ranks[best].goodput else None
            row = replace(
                row, peer=ranks[best].of_bound, ratio=ratio, note=f"{note}; the best other is {best}"
            )
        rows.append(row)
    return rows


def _at(preset: str, pool: SimulatedPool, seconds: float, factor: float) -> Workload:
    text = f"{preset}:rate={POLICY_RATE * factor},duration={seconds}"
    return with_blocks(open_workload(text, Random(1)), (pool,))


def _one_policy(preset: str, policy: str, seconds: float, search: RateSearch) -> PolicyComparison:
    pool = pool_of("llama-3.1-8b", 1, 4, 64)
    slo = SloClass("default", ttft_s=1.0, itl_s=0.05)
    at = partial(_at, preset, pool, seconds)
    setting = ServerSetting(at(1.0), (pool,), disaggregation="never", slo=slo)
    return compare(setting, (policy,), search, clock=time.perf_counter, workload_at=at)


def say(text: str) -> None:
    """Print progress."""
    sys.stderr.write(text + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all, and write the report unless `--quick`. Return 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small, without a report")
    parser.add_argument("--only", choices=("plan",), help="measure plans; others keep their rows")
    args = parser.parse_args(argv)
    rows = [] if args.only else simulated(quick=args.quick)
    say("plans")
    rows += plan_rows(1) if args.quick else plan_rows()
    for row in rows:
        say(f"{row.name}: {row.value:.4g} {row.unit}  {row.note}")
    if not args.quick:
        write("sim", "make bench-sim", [*(_kept() if args.only else ()), *rows])
    return int(any(row.met is False for row in rows))


def _kept() -> list[Row]:
    return [row for row in read(REPORTS / "sim.json") if not row.name.startswith(BEGINNING)]


def simulated(*, quick: bool) -> list[Row]:
    """Measure what is simulated."""
    rows = [small_fleet(20.0 if quick else 1800.0, RATE_EACH)]
    say("a large fleet")
    rows.append(large_fleet(10 if quick else LARGE, 20.0 if quick else HOUR_S))
    seeds = range(4 if quick else SEEDS)
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        say("seeds")
        same = sum(processes.map(equal, seeds, chunksize=10))
        rows.append(Row(f"seeds of {len(seeds):,} that replay exactly", same, "", "higher", len(seeds)))
        for preset in COMPARED[:1] if quick else COMPARED:
            say(f"policies on {preset}")
            rows += policies(preset, processes, quick=quick)
    began = time.perf_counter()
    experiments = run_all(CommandOutput(json=True, out=StringIO()))
    took = time.perf_counter() - began
    rows.append(Row(f"showcase, {len(experiments)} experiments", took, "s", "lower", 60.0))
    return rows
