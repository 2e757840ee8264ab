"""Kvasir's routing policy compared with every other policy, on recorded traffic, in virtual time.

A trace is replayed at increasing speed on simulated workers with finite caches, through the router's own
index, accounting and policies. Goodput is the highest speed-up at which at least 90 % of the requests meet
the TTFT and mean ITL of the SLO. The other figures are measured at one speed-up for all policies, four fifths
of the best other policy's goodput. Load is the engine time of the prompt tokens that a worker computed and of
the tokens that it generated, maximum over mean.

    make bench-policies TRACE=mooncake_conversation.jsonl AZURE=azure_2023_conv.csv
    make bench-policies TRACE=… ARGS='--workers 4 --policies cost,sglang --no-report'
    make bench-policies TRACE=… ARGS=--quick         a few hundred requests, as a smoke test

The traces (Mooncake, FAST 2025, Apache-2.0; Azure 2023, CC-BY) are not in this repository.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from types import MappingProxyType

from kvasir import native
from kvasir.ports.routing import RoutingPolicy
from kvasir_platform.sim.replay.goodput import Search, goodput
from kvasir_platform.sim.replay.replay import Setting, TraceReplay
from kvasir_platform.sim.replay.replica import a800_node, promise
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS, read_azure, read_mooncake
from kvasir_platform.workload.requests import Workload
from kvasir_router.decide import CostPolicy, Disaggregation, LeastLoaded, RoundRobin
from kvasir_router.decide.peers import PEERS
from kvasir_router.decide.peers.mooncake import Mooncake
from load_tests.report import Row, write

OURS = "cost"
SIZES = (4, 16, 64)
APART = (12, 4)
SEED = 1
CPU_BYTES = 1.6e12
"""KV in a node's CPU memory of 2 TB."""
PER_WORKER = 0.12
"""Speed-up per worker at which searches begin."""
COMMON = 0.8
MUST, MUST_HIT, MUST_BALANCE = 1.05, 0.9, 1.1
QUICK = 400
"""Requests of a quick run."""


def _without_transfer(disaggregation: Disaggregation, rng: Random) -> RoutingPolicy:
    """What it does without the transfers between prefill workers that it assumes: there are none here."""
    return Mooncake(disaggregation, rng, migrates=False)


POLICIES: Mapping[str, Callable[[Disaggregation, Random], RoutingPolicy]] = MappingProxyType(
    {
        OURS: CostPolicy,
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        **PEERS,
        "mooncake_no_transfer": _without_transfer,
    }
)
RULES_APART = (OURS, "least_loaded", "dynamo", "llm_d", "sglang", "mooncake", "mooncake_no_transfer")
WITHOUT_PREFIXES = (OURS, "least_loaded", "power_of_two", "dynamo", "llm_d", "sglang", "mooncake_no_transfer")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet and trace of a comparison. `apart` are the sizes of a prefill and a decode pool, which
    replace `workers` that do both; `memory` scales the caches."""

    path: Path
    workers: int
    apart: tuple[int, int] = (0, 0)
    memory: float = 1.0
    swapped: bool = False
    seed: int = SEED
    requests: int | None = None

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.workers + sum(self.apart)


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy on one fleet at one speed-up. `predicted` is the share of requests whose hit equals the
    router's prediction."""

    met: float
    hit_rate: float
    predicted: float
    imbalance: float
    ttft_p50_s: float
    ttft_p99_s: float


@cache
def _trace(path: Path, requests: int | None, swapped: bool, seed: int) -> Workload:
    trace = read_azure(path) if path.suffix == ".csv" else read_mooncake(path, Random(seed))
    if requests is not None:
        trace = trace.first(requests)
    return trace.halves_swapped() if swapped else trace


def _median_prompt(trace: Workload) -> int:
    return sorted(request.prompt_tokens for request in trace.requests)[len(trace.requests) // 2]


def setting(fleet: Fleet, speed_up: float) -> Setting:
    """The fleet with its trace."""
    trace = _trace(fleet.path, fleet.requests, fleet.swapped, fleet.seed)
    replica = a800_node(device_share=fleet.memory, cpu_bytes=fleet.memory * CPU_BYTES)
    prefill, decode = fleet.apart
    return Setting(
        trace,
        replica,
        promise(replica, _median_prompt(trace)),
        speed_up,
        workers=fleet.workers,
        prefill_workers=prefill,
        decode_workers=decode,
    )


def _policy(fleet: Fleet, name: str) -> RoutingPolicy:
    how = Disaggregation.ALWAYS if any(fleet.apart) else Disaggregation.NEVER
    return POLICIES[name](how, Random(fleet.seed))


def best_speed(fleet: Fleet, name: str, precision: float = 0.02) -> tuple[float, float]:
    """The policy's goodput, 0 if it never meets the SLO, and the CPU seconds of the search."""
    began = time.process_time()
    search = Search(start=PER_WORKER * fleet.size, precision=precision)
    try:
        found = goodput(setting(fleet, 1.0), partial(_policy, fleet, name), search)
    except ValueError:
        found = 0.0
    return found, time.process_time() - began


def at_speed(fleet: Fleet, name: str, speed_up: float) -> Figures:
    """Replay all requests with the policy at that speed-up."""
    played = setting(fleet, speed_up)
    outcome = TraceReplay(played, _policy(fleet, name)).run()
    return Figures(
        met=outcome.met,
        hit_rate=outcome.hit_rate(played.trace),
        predicted=outcome.correct_predictions / len(played.trace.requests),
        imbalance=outcome.imbalance(),
        ttft_p50_s=outcome.ttft_quantile_s(0.5),
        ttft_p99_s=outcome.ttft_quantile_s(0.99),
    )


def compare(
    pool: ProcessPoolExecutor, fleet: Fleet, names: Sequence[str], label: str, precision: float = 0.02
) -> list[Row]:
    """The rows of one fleet."""
    searches = {name: pool.submit(best_speed, fleet, name, precision) for name in names}
    speeds: dict[str, float] = {}
    for name, search in searches.items():
        speeds[name], spent = search.result()
        say(f"{label}: {name}: goodput {speeds[name]:.3f} ({spent:.0f} s of CPU)")
    peers = [name for name in names if name != OURS]
    best = max(peers, key=lambda name: speeds[name]) if peers else OURS
    common = COMMON * speeds[best]
    runs = {name: pool.submit(at_speed, fleet, name, common) for name in names}
    rows = [_goodput(name, label, speeds, best if name == OURS and peers else None) for name in names]
    for name in names:
        rows += _at_common(name, f"{name}, {label}, speed-up {common:.3g}", runs[name].result(), fleet)
    say(f"{label}: all at {common:.3g} x")
    return rows


def _goodput(name: str, label: str, speeds: Mapping[str, float], best: str | None) -> Row:
    row = Row(f"goodput, {name}, {label}", speeds[name], "x", "higher")
    if best is None:
        return row
    return replace(
        row,
        peer=speeds[best],
        ratio=speeds[name] / speeds[best] if speeds[best] else None,
        target_ratio=MUST,
        note=f"the best comparator is {best}",
    )


def _at_common(name: str, at: str, figures: Figures, fleet: Fleet) -> list[Row]:
    # The targets apply to fleets of aggregated workers and to traffic with prefixes.
    bound = name == OURS and not any(fleet.apart) and fleet.path.suffix != ".csv"
    rows = [
        Row(f"load max/mean, {at}", figures.imbalance, "", "lower", MUST_BALANCE if bound else None),
        Row(f"TTFT p50, {at}", figures.ttft_p50_s, "s", "lower"),
        Row(f"TTFT p99, {at}", figures.ttft_p99_s, "s", "lower"),
        Row(f"requests that met the promise, {at}", figures.met, "", "higher"),
    ]
    if fleet.path.suffix == ".csv":
        return rows
    hits = Row(
        f"hits of an infinite cache's, {at}", figures.hit_rate, "", "higher", MUST_HIT if bound else None
    )
    return [hits, *rows, Row(f"requests whose hit was foreseen, {at}", figures.predicted, "", "higher")]


def robustness(pool: ProcessPoolExecutor, path: Path, peers: Sequence[str]) -> list[Row]:
    """Whether the lead holds when the assumptions change: 16 workers."""
    variants = {
        "another seed": Fleet(path, 16, seed=SEED + 1),
        "half the caches": Fleet(path, 16, memory=0.5),
        "halves of the trace swapped": Fleet(path, 16, swapped=True),
    }
    rows = []
    for label, fleet in variants.items():
        searches = {name: pool.submit(best_speed, fleet, name) for name in (OURS, *peers)}
        speeds = {name: search.result()[0] for name, search in searches.items()}
        best = max(peers, key=lambda name: speeds[name])
        say(f"{label}: {speeds[OURS]:.3f}, {best} {speeds[best]:.3f}")
        row = _goodput(OURS, f"16 workers, {label}", speeds, best)
        rows.append(replace(row, note=f"beside {', '.join(peers)}; the best is {best}"))
    return rows


def facts(fleet: Fleet) -> str:
    """Description of the simulation."""
    played = setting(fleet, 1.0)
    trace, replica, slo = played.trace, played.replica, played.slo
    shared = trace.infinite_hits() / trace.prompt_tokens
    parts = (
        f"{len(trace.requests):,} requests, of whose prompt tokens an infinite cache hits {shared:.1%}",
        f"each worker LLaMA2-70B on {replica.hardware.devices} x {replica.hardware.device}, "
        f"{1 / replica.prefill_token_s:,.0f} prompt tokens/s before attention, a step of at most "
        f"{replica.step_tokens} tokens and {replica.step_fixed_s * 1e3:.1f} ms, more with streams, "
        f"a cache of {replica.device_blocks:,} + {replica.cpu_blocks:,} blocks of {TRACE_BLOCK_TOKENS} "
        "tokens (device + CPU memory)",
        f"promise: TTFT {slo.ttft_s:.2f} s and mean ITL {slo.itl_s * 1e3:.0f} ms (ten and five times what a "
        "request of median length has on an idle worker), for 90 % of the requests",
        f"reports come {played.report_delay_s * 1e3:.0f} ms late",
    )
    return "; ".join(parts)


def say(line: str) -> None:
    """Print progress."""
    sys.stderr.write(line + "\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit with a message if it is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="mooncake_conversation.jsonl")
    parser.add_argument("--azure", type=Path, help="azure_2023_conv.csv, for a table without prefixes")
    parser.add_argument("--workers", type=int, action="append", help="fleet size (repeatable); 4, 16 and 64")
    parser.add_argument(
        "--policies", help="names, separated by commas, for fleets of whole workers only; all"
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} requests, 4 workers, no report")
    parser.add_argument("--no-report", action="store_true", help="print, and write no report")
    parser.add_argument("--processes", type=int, default=2, help="concurrent replays (2)")
    args = parser.parse_args(argv)
    if not native.IS_NATIVE and not args.quick:
        sys.exit("the native extension is not built: make install")
    for path in (args.trace, args.azure):
        if path is not None and not path.is_file():
            sys.exit(f"{path}: no such file; traces are in their publishers' repositories")
    names = args.policies.split(",") if args.policies else list(POLICIES)
    if unknown := [name for name in names if name not in POLICIES]:
        sys.exit(f"no policy {', '.join(unknown)}; there are {', '.join(POLICIES)}")
    args.names = names
    return args


def measure(pool: ProcessPoolExecutor, args: argparse.Namespace) -> Iterator[list[Row]]:
    """Every requested table, one after the other."""
    if args.quick:
        names = (OURS, "llm_d", "round_robin")
        yield compare(pool, Fleet(args.trace, 4, requests=QUICK), names, "4 workers", precision=0.1)
        return
    speeds: dict[str, float] = {}
    for workers in args.workers or SIZES:
        rows = compare(pool, Fleet(args.trace, workers), args.names, f"{workers} workers")
        speeds |= {row.name: row.value for row in rows}
        yield rows
    if args.policies:
        return
    peers = [name for name in args.names if name != OURS]
    strongest = sorted(peers, key=lambda name: -speeds.get(f"goodput, {name}, 16 workers", 0.0))
    yield robustness(pool, args.trace, strongest[:3])
    apart = "{} prefill + {} decode".format(*APART)
    yield compare(pool, Fleet(args.trace, 0, apart=APART), RULES_APART, apart)
    if args.azure is not None:
        yield compare(pool, Fleet(args.azure, 16), WITHOUT_PREFIXES, "Azure, 16 workers")


def main(argv: Sequence[str]) -> list[Row]:
    """Measure, and write the report or print it. The report is written after every table, so that an
    interrupted run keeps its results."""
    args = parse(argv)
    known = facts(Fleet(args.trace, 4, requests=QUICK if args.quick else None))
    azure = "" if args.azure is None else f" AZURE={args.azure.name}"
    rows: list[Row] = []
    with ProcessPoolExecutor(args.processes) as pool:
        for table in measure(pool, args):
            if not rows:
                table[0] = replace(table[0], note=f"{table[0].note}. {known}")
            rows += table
            if not (args.no_report or args.quick):
                write("policies", f"make bench-policies TRACE={args.trace.name}{azure}", rows)
    if args.no_report or args.quick:
        for row in rows:
            ratio = "" if row.ratio is None else f"({row.ratio:.3f})"
            print(f"{row.name}: {row.value:.4g} {row.unit} {ratio}")
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
