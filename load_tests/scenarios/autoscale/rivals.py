"""The rivals' settings, tuned with hindsight for each day."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvasir_platform.sim.scaling.fleet import ScaledFleet
from kvasir_platform.sim.scaling.rivals import SYNC_S, play
from load_tests.scenarios.autoscale.days import (
    BEGIN,
    BOUNDS,
    HPA,
    KEEP,
    Case,
    Outcome,
    Setting,
    fleet_of,
    kind,
    outcome_of,
    traffic,
)

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
        times, _ = traffic(self.case)
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
        outcome = outcome_of(fleet, str(setting))
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
        return play(fleet_of(self.case, sizes), setting.rule(), BOUNDS, self.case.length_s, give_up)

    def result(self) -> Outcome:
        """The cheapest settings that meet the 99 %; for a rival that never does, the settings that met it the
        most, among the runs that lasted longest, which are then run to the end."""
        if self.best is not None:
            return replace(self.best[1], runs=self.runs)
        lasting = sorted(self._lasted, key=lambda each: -self._lasted[each])[:2]
        ends = [outcome_of(self._play(each, lambda _: False), str(each)) for each in lasting]
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

    times, shapes = traffic(trials.case)
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
    HPA: lambda trials: _tune_targets(trials, HPA, HPA_TARGETS, SEATS),
    "queue": lambda trials: _tune_targets(trials, "queue", QUEUE_TARGETS, STREAMS),
    "ttft": _tune_ttft,
    "static": _tune_static,
}


def rival(case: Case, name: str) -> Outcome:
    """The best result of a rival on that day."""
    trials = Trials(case)
    RIVALS[name](trials)
    return trials.result()
