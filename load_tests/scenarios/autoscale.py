"""Cost of a day with autoscaling: Kvasir's planner compared with common scaling rules.

A day of traffic runs through a prefill and a decode pool in virtual time, request by request, while a scaler
decides the number of replicas of each. All of a replica's time is counted: while it starts (two minutes),
serves, and drains. The scaler with the fewest replica-hours wins, provided that at least 99 % of the requests
meet the TTFT and mean ITL of the SLO.

There are two days: a slow wave from night to afternoon, and one with fourteen additional bursts, each within
minutes. No scaler is told what comes. Kvasir's planner runs once, with its defaults. Each rival is tuned with
hindsight for that very day and seed: of all its settings the cheapest that meets the 99 % counts, and the
search continues around it in finer steps than an operator would use. A rival's figure is therefore a lower
bound of what its kind of rule costs.

    make bench-autoscale TRACE=mooncake_conversation.jsonl
    make bench-autoscale TRACE=… ARGS='--seeds 8,9 --days wave --rivals hpa,queue --no-report'
    make bench-autoscale TRACE=… ARGS=--quick         half an hour instead of days, as a smoke test
    make bench-autoscale TRACE=… ARGS='--keep /tmp/rivals.jsonl'

The last one caches the rivals' results and reuses them the next time: tuning them is nearly all of the work.
They are tuned again when the fleet, the days, the rivals, this file or the trace have changed. Kvasir's
planner always runs.

Requests are drawn from the trace (Mooncake, FAST 2025, Apache-2.0; not in this repository), each with the
part of its prompt that one infinite cache would not have. Replicas have the performance of the test bed that
the trace was published with, and the SLO is that of its authors: 30 s TTFT and 0.1 s ITL.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    ModelSpec,
    PoolScalingSpec,
    PoolSpec,
    ScalingSpec,
    SloSpec,
)
from kvasir.core.requests import Role
from kvasir_platform.planner.loop import ScalingLoop
from kvasir_platform.sim.replay.replica import a800_node
from kvasir_platform.sim.replay.trace import BLOCK_TOKENS, RequestTrace, read_mooncake
from kvasir_platform.sim.scaling.days import DAY_S, Day, RequestShape, arrivals, crowds, drawn
from kvasir_platform.sim.scaling.fleet import Kind, ScaledFleet, SimSlo
from kvasir_platform.sim.scaling.rivals import SYNC_S, Hpa, Queue, Rule, Static, Ttft, play
from load_tests.report import Row, median, write

OURS = "ours"
WAVE, BURSTS = "wave", "bursts"
DAYS = (WAVE, BURSTS)
SEEDS = (51, 52, 53)
"""Seeds of days that were not used while the planner was developed: that used 1, 5 to 7, 21 to 23, 31 to 33,
41 to 43 and 101 to 124."""
LEVEL = SimSlo(ttft_s=30.0, itl_s=0.1)
KEEP = 0.99
START_S = 120.0
PREFILL_FIXED_S = 0.01
BOUNDS = {"prefill": (Role.PREFILL, 80), "decode": (Role.DECODE, 20)}
"""Limit for every scaler: at most 100 replicas that serve or start."""
MOST = 100
BEGIN = {"prefill": 10, "decode": 3}
"""Replicas at midnight, except for a static fleet."""
STEP_S, INTERVAL_S = 5.0, 15.0
QUICK_S = 1800.0

HPA_TARGETS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
QUEUE_TARGETS = (0.5, 0.65, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
SEATS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
STREAMS = (20.0, 30.0, 40.0, 50.0, 60.0, 75.0, 90.0)
TTFT_BETWEEN = (
    *((0.2, 0.4), (0.15, 0.3), (0.15, 0.2), (0.12, 0.3), (0.12, 0.2), (0.1, 0.3), (0.1, 0.2), (0.1, 0.15)),
    *((0.05, 0.3), (0.05, 0.2), (0.05, 0.15)),
)
"""(low, high) as fractions of the SLO. The 90th percentile of an idle fleet is 0.085; a lower threshold below
that never scales down."""
STAYS_S = (300.0, 60.0)
"""HorizontalPodAutoscaler's default, and a short one."""
REFINE = 2
NUDGES = (1.06, 1.03)
PRUDENT = 2
"""Values of SEATS and STREAMS at which a search begins."""
PRUDENT_PREFILL = 0.95


class Setting(NamedTuple):
    """A rival's settings: figures for prefill and decode workers (the sizes of a static fleet), the
    stabilization window before scaling down, and for `ttft` the low threshold, where `prefill` is the high
    one."""

    rival: str
    prefill: float
    decode: float
    stays_s: float = 0.0
    low: float = 0.0

    def __str__(self) -> str:
        if self.rival == "static":
            return f"{self.prefill:.0f} + {self.decode:.0f}"
        shown = f"{self.prefill:.3g}" if self.low == 0.0 else f"{self.low:g} to {self.prefill:g}"
        return f"{shown}, decode {self.decode:.3g}, {self.stays_s:.0f} s"

    def rule(self) -> Rule:
        """Return a new scaler."""
        targets = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        if self.rival == "static":
            return Static({"prefill": int(self.prefill), "decode": int(self.decode)})
        if self.rival == "hpa":
            return Hpa(targets, self.stays_s)
        if self.rival == "queue":
            return Queue(targets, self.stays_s)
        return Ttft(LEVEL.ttft_s, (self.low, self.prefill), self.decode, self.stays_s)


@dataclass(frozen=True, slots=True)
class Case:
    """One day of traffic."""

    path: Path
    day: str
    seed: int
    length_s: float = DAY_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one day. `planning_s` is CPU time."""

    setting: str
    kept: float
    hours: float
    most: int
    starts: int
    runs: int = 1
    planning_s: float = 0.0

    @property
    def good(self) -> bool:
        """Whether the day met the 99 %."""
        return self.kept >= KEEP


def shapes_of(trace: RequestTrace) -> list[RequestShape]:
    """Every request with the tokens that an infinite cache leaves to compute: at least its last token."""
    seen: set[int] = set()
    found = []
    for each in trace.requests:
        depth = next((i for i, name in enumerate(each.names) if name not in seen), len(each.names))
        seen.update(each.names)
        hit = min(depth, (each.prompt_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        found.append(RequestShape(each.prompt_tokens, each.prompt_tokens - hit, each.output_tokens))
    return found


@cache
def _shapes(path: Path) -> list[RequestShape]:
    # Arrival times within the trace's ticks are drawn and not used here.
    return shapes_of(read_mooncake(path, Random(0)))


@lru_cache(maxsize=1)
def _traffic(case: Case) -> tuple[list[float], list[RequestShape]]:
    rng = np.random.default_rng(case.seed)
    if case.day == WAVE:
        day = Day(3.0, 22.0, 0.1, length_s=case.length_s)
    else:
        count = max(1, round(14 * case.length_s / DAY_S))
        day = Day(6.0, 10.0, 0.1, crowds(count, rng, case.length_s), case.length_s)
    times = arrivals(day.rates(rng), rng)
    return times.tolist(), drawn(_shapes(case.path), len(times), rng)


def kind() -> Kind:
    """The performance of every replica."""
    node = a800_node()
    return Kind(
        prefill_fixed_s=PREFILL_FIXED_S,
        prefill_token_s=node.prefill_token_s,
        prefill_context_s=node.prefill_context_s,
        step_fixed_s=node.step_fixed_s,
        step_stream_s=node.step_stream_s,
        step_kv_token_s=node.step_kv_token_s,
        kv_tokens=node.device_blocks * BLOCK_TOKENS,
        most_streams=node.most_streams,
        start_s=START_S,
    )


def _fleet(case: Case, sizes: Mapping[str, int]) -> ScaledFleet:
    pools = {name: (role, sizes[name]) for name, (role, _) in BOUNDS.items()}
    return ScaledFleet(kind(), LEVEL, pools, *_traffic(case))


def _outcome(fleet: ScaledFleet, setting: str) -> Outcome:
    return Outcome(setting, fleet.met / fleet.judged, fleet.paid_s / 3600, fleet.most, fleet.starts)


# -- ours ----------------------------------------------------------------------------------------


def deployment() -> Deployment:
    """The planner's configuration: the SLO, the bounds, and the same interval as the rivals; defaults
    otherwise."""
    seats = EngineSpec(max_num_seqs=kind().most_streams)
    return Deployment(
        model=ModelSpec(source="kvasir-tiny", served_name="model"),
        slo=(SloSpec(name="default", ttft_s=LEVEL.ttft_s, itl_s=LEVEL.itl_s),),
        pools=tuple(
            PoolSpec(
                name=name,
                role=role,
                replicas=BEGIN[name],
                scaling=PoolScalingSpec(min=1, max=most),
                engine=seats,
            )
            for name, (role, most) in BOUNDS.items()
        ),
        scaling=ScalingSpec(interval_s=INTERVAL_S),
    )


def ours(case: Case) -> Outcome:
    """Run a day with our planner."""
    fleet = _fleet(case, BEGIN)
    fleet.epoch = "bench"
    loop = ScalingLoop(deployment(), fleet, epoch=fleet.epoch, tell=lambda *_args, **_details: None)
    now = planning_s = 0.0
    while now < case.length_s:
        now += STEP_S
        fleet.run(now)
        report = fleet.report()
        began = time.process_time()
        word = loop.take(report, now)
        loop.step(now)
        planning_s += time.process_time() - began
        fleet.assign(word.roles)
    fleet.end()
    return replace(_outcome(fleet, "its defaults"), planning_s=planning_s)


# -- rivals --------------------------------------------------------------------------------------


class Trials:
    """Run one day with a rival's settings. A run that cannot win is aborted: it missed more than 1 % of all
    requests, or cost as much as the best run before."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.best: tuple[Setting, Outcome] | None = None
        self.runs = 0
        self._verdicts: dict[Setting, str] = {}
        self._lasted: dict[Setting, float] = {}

    def verdict(self, setting: Setting) -> str:
        """`kept`, `missed`, or `dear`: aborted for cost while the 99 % was still reachable."""
        if setting not in self._verdicts:
            self._verdicts[setting] = self._judge(setting)
        return self._verdicts[setting]

    def _judge(self, setting: Setting) -> str:
        times, _ = _traffic(self.case)
        may_miss = (1.0 - KEEP) * len(times)
        # Replicas alive at each tick, times the interval: within 1 % of the bill.
        most_s = math.inf if self.best is None else 1.01 * 3600 * self.best[1].hours
        spent_s = 0.0

        def hopeless(fleet: ScaledFleet) -> bool:
            nonlocal spent_s
            spent_s += SYNC_S * len(fleet.observe())
            return fleet.judged - fleet.met > may_miss or spent_s > most_s

        fleet = self._play(setting, hopeless)
        missed = fleet.judged - fleet.met > may_miss
        if missed:
            self._lasted[setting] = fleet.now
            return "missed"
        if fleet.now < self.case.length_s:
            return "dear"
        outcome = _outcome(fleet, str(setting))
        if not outcome.good:
            self._lasted[setting] = fleet.now
            return "missed"
        if self.best is None or outcome.hours < self.best[1].hours:
            self.best = (setting, outcome)
        return "kept"

    def _play(self, setting: Setting, give_up: Callable[[ScaledFleet], bool]) -> ScaledFleet:
        self.runs += 1
        sizes = BEGIN
        if setting.rival == "static":
            sizes = {"prefill": int(setting.prefill), "decode": int(setting.decode)}
        return play(_fleet(self.case, sizes), setting.rule(), BOUNDS, self.case.length_s, give_up)

    def result(self) -> Outcome:
        """The cheapest settings that meet the 99 %; for a rival that never does, the settings that met it the
        most, among the runs that lasted longest, which are then run to the end."""
        if self.best is not None:
            return replace(self.best[1], runs=self.runs)
        lasting = sorted(self._lasted, key=lambda each: -self._lasted[each])[:2]
        ends = [_outcome(self._play(each, lambda _: False), str(each)) for each in lasting]
        return replace(max(ends, key=lambda each: each.kept), runs=self.runs)


def sweep(trials: Trials, grid: Iterable[float], make: Callable[[float], Setting]) -> float | None:
    """Find the highest target that meets the 99 %, which is the cheapest, by bisection and then between it
    and the next."""
    targets = sorted(grid)
    safe, bold = -1, len(targets)
    while bold - safe > 1:
        middle = (safe + bold) // 2
        if trials.verdict(make(targets[middle])) == "missed":
            bold = middle
        else:
            safe = middle
    if safe < 0:
        return None
    found = targets[safe]
    above = targets[bold] if bold < len(targets) else found
    for _ in range(REFINE if above > found else 0):
        between = math.sqrt(found * above)
        if trials.verdict(make(between)) == "missed":
            above = between
        else:
            found = between
    return found


def _tune_targets(trials: Trials, rival: str, targets: Sequence[float], fills: Sequence[float]) -> None:
    """Search one figure after the other, prefill first, because decode workers are the smaller part of the
    bill. Starts where decode workers are hardly ever full, or at equal values."""

    def setting(target: float, fill: float, stays_s: float) -> Setting:
        return Setting(rival, target, fill, stays_s)

    for fill in reversed(fills[: PRUDENT + 1]):
        boldest = max(targets)
        for stays_s in STAYS_S:
            # If 300 s are not enough, neither are 60 s.
            some = [each for each in targets if each <= boldest]
            found = sweep(trials, some, partial(setting, fill=fill, stays_s=stays_s))
            if found is None:
                break
            boldest = found
        if trials.best is not None:
            break
    _tune_fill(trials, fills)


def _tune_ttft(trials: Trials) -> None:
    for seats in reversed(SEATS[: PRUDENT + 1]):
        for stays_s in STAYS_S:
            for low, high in TTFT_BETWEEN:
                trials.verdict(Setting("ttft", high, seats, stays_s, low))
        if trials.best is not None:
            break
    _tune_fill(trials, SEATS)


def _tune_fill(trials: Trials, fills: Sequence[float]) -> None:
    """Search decode workers with the best prefill, and with slightly more of it, which leaves more requests
    to miss."""
    for times in (1.0, PRUDENT_PREFILL):
        if trials.best is None:
            return
        chosen = trials.best[0]
        chosen = chosen._replace(prefill=times * chosen.prefill, low=times * chosen.low)
        bolder = [each for each in fills if each > chosen.decode]
        sweep(trials, [chosen.decode, *bolder] if times == 1.0 else bolder, partial(_filled, chosen))
    _nudge(trials)


def _filled(setting: Setting, fill: float) -> Setting:
    return setting._replace(decode=fill)


def _nudge(trials: Trials) -> None:
    """A slightly higher target than the best."""
    for times in NUDGES:
        assert trials.best is not None
        chosen = trials.best[0]
        for bolder in (
            chosen._replace(prefill=times * chosen.prefill, low=times * chosen.low),
            chosen._replace(decode=times * chosen.decode),
        ):
            trials.verdict(bolder)


def _tune_static(trials: Trials) -> None:
    most = {name: most for name, (_, most) in BOUNDS.items()}

    def least(guess: int, upper: int, make: Callable[[int], Setting]) -> int:
        """The smallest value that meets the 99 %, assuming a single step."""
        low, high = 0, upper + 1
        size = min(guess, upper)
        while high - low > 1:
            if trials.verdict(make(size)) == "missed":
                low = size
                size = min((low + high) // 2, max(low + 1, round(low * 1.15)))
            else:
                high = size
                size = max((low + high) // 2, min(high - 1, round(high * 0.87)))
        return high

    times, shapes = _traffic(trials.case)
    replica = kind()
    work = np.bincount((np.array(times) // 600).astype(int), [replica.prefill_s(each) for each in shapes])
    decode = most["decode"]
    prefill = least(
        max(1, round(float(work.max()) / 600)), most["prefill"], lambda p: Setting("static", p, decode)
    )
    decode = least(max(1, round(prefill / 5)), decode, lambda d: Setting("static", prefill, d))
    while decode > 2 and trials.verdict(Setting("static", prefill + 1, decode - 2)) == "kept":
        prefill, decode = prefill + 1, decode - 2


RIVALS: Mapping[str, Callable[[Trials], None]] = {
    "hpa": lambda trials: _tune_targets(trials, "hpa", HPA_TARGETS, SEATS),
    "queue": lambda trials: _tune_targets(trials, "queue", QUEUE_TARGETS, STREAMS),
    "ttft": _tune_ttft,
    "static": _tune_static,
}


def rival(case: Case, name: str) -> Outcome:
    """The best result of a rival on that day."""
    trials = Trials(case)
    RIVALS[name](trials)
    return trials.result()


# -- rows ----------------------------------------------------------------------------------------


def rows_of(day: str, outcomes: Mapping[str, Mapping[int, Outcome]]) -> list[Row]:
    """The rows of a day, from the results by scaler and seed. A rival that misses the 99 % with one seed is
    not used as the peer."""
    mine = outcomes[OURS]
    seeds = tuple(sorted(mine))
    hours = {who: median([each.hours for each in found.values()]) for who, found in outcomes.items()}
    peers = [who for who in outcomes if who != OURS and all(each.good for each in outcomes[who].values())]
    best = min(peers, key=lambda who: hours[who][0], default=None)
    value, spread = hours[OURS]
    row = Row(
        f"GPU-hours, {day}, ours", value, "replica-h", "lower", spread=spread, seeds=seeds, note=_story(mine)
    )
    if best is not None:
        peer = hours[best][0]
        note = f"the best rival is {best}; {row.note}"
        row = replace(row, peer=peer, ratio=value / peer, target_ratio=1.0, note=note)
    rows = [row]
    for who in sorted(set(outcomes) - {OURS}, key=lambda who: hours[who][0]):
        theirs, spread = hours[who]
        row = Row(f"GPU-hours, {day}, {who}", theirs, "replica-h", "lower", spread=spread, seeds=seeds)
        if who in peers:
            row = replace(row, peer=value, ratio=theirs / value, note=_story(outcomes[who]))
        else:
            row = replace(row, note=f"{_failure(outcomes[who])}; {_story(outcomes[who])}")
        rows.append(row)
    kept = [100 * each.kept for each in mine.values()]
    rows += [
        Row(
            f"SLO kept, {day}, ours",
            min(kept),
            "%",
            "higher",
            target=100 * KEEP,
            spread=(min(kept), max(kept)),
            seeds=seeds,
            note="the least of the seeds",
        ),
        Row(
            f"most workers alive, {day}, ours",
            max(each.most for each in mine.values()),
            "",
            "lower",
            target=MOST,
            spread=_range([each.most for each in mine.values()]),
            seeds=seeds,
            note="the most of the seeds, with those that start and those that end their work before they "
            "leave",
        ),
        Row(
            f"starts a day, {day}, ours",
            statistics.median(each.starts for each in mine.values()),
            "",
            "lower",
            spread=_range([each.starts for each in mine.values()]),
            seeds=seeds,
            note="; ".join(
                f"{who} {statistics.median(each.starts for each in outcomes[who].values()):.0f}"
                for who in sorted(set(outcomes) - {OURS})
            ),
        ),
        Row(
            f"planning a day, {day}, ours",
            statistics.median(each.planning_s for each in mine.values()),
            "CPU s",
            "lower",
            spread=_range([each.planning_s for each in mine.values()]),
            seeds=seeds,
            note="every 15 s, with what the simulated fleet takes to be seen",
        ),
    ]
    return rows


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _story(found: Mapping[int, Outcome]) -> str:
    parts = (
        f"seed {seed}: {each.hours:.0f} h, {100 * each.kept:.2f} % "
        f"({each.setting}; at most {each.most} alive)"
        for seed, each in sorted(found.items())
    )
    return "; ".join(parts)


def _failure(found: Mapping[int, Outcome]) -> str:
    missed = {seed: each for seed, each in sorted(found.items()) if not each.good}
    best = max(missed.values(), key=lambda each: each.kept)
    seeds = ", ".join(map(str, missed))
    return (
        f"no setting keeps {100 * KEEP:.0f} % with seed {seeds} (the best there {100 * best.kept:.2f} %): "
        "no peer"
    )


def facts(path: Path) -> str:
    """Description of the simulation."""
    replica, shapes = kind(), _shapes(path)
    prompt = statistics.fmean(each.prompt for each in shapes)
    computed = statistics.fmean(each.computed for each in shapes)
    took = statistics.fmean(replica.prefill_s(each) for each in shapes)
    return (
        f"Prompts of {prompt:,.0f} tokens on average, {computed:,.0f} of them to compute in {took:.2f} s; "
        f"a replica is LLaMA2-70B on eight A800 with {replica.kv_tokens:,} tokens of KV, and starts in "
        f"{replica.start_s:.0f} s; promise: TTFT {LEVEL.ttft_s:g} s and mean ITL {LEVEL.itl_s:g} s; "
        f"prefill 1 to {BOUNDS['prefill'][1]}, decode 1 to {BOUNDS['decode'][1]} replicas for everybody. A "
        "rival's settings: its figure for prefill, for decode, and how long it waits before it shrinks"
    )


# -- the command ---------------------------------------------------------------------------------


def say(line: str) -> None:
    """Print progress."""
    sys.stderr.write(line + "\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit with a message if it is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="mooncake_conversation.jsonl")
    parser.add_argument("--seeds", help="separated by commas; " + ",".join(map(str, SEEDS)))
    parser.add_argument("--days", help="separated by commas; " + ",".join(DAYS))
    parser.add_argument("--rivals", help="separated by commas; " + ",".join(RIVALS))
    parser.add_argument("--quick", action="store_true", help="half an hour, one seed, no report")
    parser.add_argument("--no-report", action="store_true", help="print, and write no report")
    parser.add_argument("--keep", type=Path, help="a file for what rivals came to, read again the next time")
    parser.add_argument("--processes", type=int, default=2, help="days played at once (2)")
    args = parser.parse_args(argv)
    if not args.trace.is_file():
        sys.exit(f"{args.trace}: no such file; the trace is in its publisher's repository")
    try:
        args.seeds = [int(each) for each in args.seeds.split(",")] if args.seeds else list(SEEDS)
    except ValueError:
        sys.exit(f"--seeds {args.seeds}: not numbers, separated by commas")
    for name, known in (("days", DAYS), ("rivals", tuple(RIVALS))):
        chosen = getattr(args, name)
        named = chosen.split(",") if chosen else list(known)
        if unknown := [each for each in named if each not in known]:
            sys.exit(f"--{name}: no {', '.join(unknown)}; there are {', '.join(known)}")
        setattr(args, name, named)
    return args


class Kept:
    """A cache of rivals' results in a file of JSON lines; does nothing without a file."""

    def __init__(self, path: Path | None, trace: Path) -> None:
        self._path = path
        self._of = _digest(trace) if path is not None else ""
        self._found: dict[tuple[str, str, int, float], Outcome] = {}
        if path is None or not path.exists():
            return
        for line in path.read_text().splitlines():
            stored = json.loads(line)
            if stored.pop("of") == self._of:
                who, day, seed, length_s = stored.pop("case")
                self._found[who, day, seed, length_s] = Outcome(**stored)

    def get(self, case: Case, who: str) -> Outcome | None:
        """Return a stored result."""
        return self._found.get((who, case.day, case.seed, case.length_s))

    def add(self, case: Case, who: str, found: Outcome) -> None:
        """Store a result."""
        if self._path is not None and who != OURS and self.get(case, who) is None:
            stored = {"of": self._of, "case": [who, case.day, case.seed, case.length_s]}
            with self._path.open("a") as lines:
                lines.write(json.dumps(stored | asdict(found)) + "\n")


def _digest(trace: Path) -> str:
    """A digest of everything that a rival's result depends on."""
    sources = {inspect.getfile(each) for each in (Trials, ScaledFleet, Day, Hpa, a800_node, read_mooncake)}
    digest = hashlib.sha256()
    for path in (*sorted(map(Path, sources)), trace):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def measure(pool: ProcessPoolExecutor, args: argparse.Namespace) -> dict[str, dict[str, dict[int, Outcome]]]:
    """All results, by day, scaler and seed."""
    seeds, length_s = (args.seeds[:1], QUICK_S) if args.quick else (args.seeds, DAY_S)
    found: dict[str, dict[str, dict[int, Outcome]]] = {
        day: {who: {} for who in (OURS, *args.rivals)} for day in args.days
    }
    kept = Kept(args.keep, args.trace)
    tasks: dict[Future[Outcome], tuple[Case, str]] = {}
    # Longest first. A day is generated again for each of its tasks, which takes a second.
    for who in (*args.rivals, OURS):
        for case in (Case(args.trace, day, seed, length_s) for day in args.days for seed in seeds):
            before = kept.get(case, who)
            if before is not None:
                found[case.day][who][case.seed] = before
            else:
                future = pool.submit(ours, case) if who == OURS else pool.submit(rival, case, who)
                tasks[future] = case, who
    for future in as_completed(tasks):
        case, who = tasks[future]
        each = found[case.day][who][case.seed] = future.result()
        kept.add(case, who, each)
        say(
            f"{case.day}, seed {case.seed}: {who}: {each.hours:.0f} h, {100 * each.kept:.2f} %, at most "
            f"{each.most} alive, {each.starts} starts ({each.setting}; {each.runs} runs)"
        )
    return found


def main(argv: Sequence[str]) -> list[Row]:
    """Measure, and write the report or print it."""
    args = parse(argv)
    with ProcessPoolExecutor(args.processes) as pool:
        found = measure(pool, args)
    rows = [row for day in args.days for row in rows_of(day, found[day])]
    rows[0] = replace(rows[0], note=f"{rows[0].note}. {facts(args.trace)}")
    if args.no_report or args.quick:
        for row in rows:
            ratio = "" if row.ratio is None else f"({row.ratio:.3f})"
            print(f"{row.name}: {row.value:.4g} {row.unit} {ratio} {row.note}")
    else:
        write("autoscale", f"make bench-autoscale TRACE={args.trace.name}", rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
