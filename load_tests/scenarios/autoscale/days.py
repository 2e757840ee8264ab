"""The simulated days: traffic, replicas, and our planner's run of a day."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
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
from kvasir_platform.sim.scaling.days import DAY_S, Day, RequestShape, arrivals, crowds, drawn
from kvasir_platform.sim.scaling.fleet import Kind, ScaledFleet, SimSlo
from kvasir_platform.sim.scaling.rivals import Hpa, Queue, Rule, Static, Ttft
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS, read_mooncake
from kvasir_platform.workload.requests import Workload

OURS, HPA = "ours", "hpa"
WAVE, BURSTS = "wave", "bursts"
DAYS = (WAVE, BURSTS)
SEEDS = (61, 62, 63)
"""Seeds of days that were not used while the planner was developed: that used 1, 5 to 7, 21 to 23, 31 to 33,
41 to 43, 51 to 53 and 101 to 124."""
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
        if self.rival == HPA:
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


def shapes_of(trace: Workload) -> list[RequestShape]:
    """Every request with the tokens that an infinite cache leaves to compute: at least its last token."""
    seen: set[int] = set()
    found = []
    for each in trace.requests:
        depth = next((i for i, name in enumerate(each.names) if name not in seen), len(each.names))
        seen.update(each.names)
        hit = min(depth, (each.prompt_tokens - 1) // TRACE_BLOCK_TOKENS) * TRACE_BLOCK_TOKENS
        found.append(RequestShape(each.prompt_tokens, each.prompt_tokens - hit, each.output_tokens))
    return found


@cache
def trace_shapes(path: Path) -> list[RequestShape]:
    # Arrival times within the trace's ticks are drawn and not used here.
    return shapes_of(read_mooncake(path, Random(0)))


@lru_cache(maxsize=1)
def traffic(case: Case) -> tuple[list[float], list[RequestShape]]:
    rng = np.random.default_rng(case.seed)
    if case.day == WAVE:
        day = Day(3.0, 22.0, 0.1, length_s=case.length_s)
    else:
        count = max(1, round(14 * case.length_s / DAY_S))
        day = Day(6.0, 10.0, 0.1, crowds(count, rng, case.length_s), case.length_s)
    times = arrivals(day.rates(rng), rng)
    return times.tolist(), drawn(trace_shapes(case.path), len(times), rng)


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
        kv_tokens=node.device_blocks * TRACE_BLOCK_TOKENS,
        most_streams=node.most_streams,
        start_s=START_S,
    )


def fleet_of(case: Case, sizes: Mapping[str, int]) -> ScaledFleet:
    pools = {name: (role, sizes[name]) for name, (role, _) in BOUNDS.items()}
    return ScaledFleet(kind(), LEVEL, pools, *traffic(case))


def outcome_of(fleet: ScaledFleet, setting: str) -> Outcome:
    return Outcome(setting, fleet.met / fleet.judged, fleet.paid_s / 3600, fleet.most, fleet.starts)


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
    fleet = fleet_of(case, BEGIN)
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
    return replace(outcome_of(fleet, "its defaults"), planning_s=planning_s)
