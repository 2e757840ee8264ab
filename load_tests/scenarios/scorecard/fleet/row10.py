"""Load above capacity: goodput holds, excess requests are refused at once, and memory does not grow; a greedy
tenant and very long prompts do not delay the first tokens of others.

Capacity is determined by the simulated engines' time and not by this machine, so that five times the capacity
can be sent from here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.kit.lab.fleet import Fleet, Layout
from tests.kit.lab.load import OpenLoop, closed_loop, quantile
from tests.kit.lab.processes import resident_bytes
from tests.kit.lab.stream import Outcome

from kvasir.config.spec.deployment import Deployment, SloSpec
from kvasir.telemetry.reasons import REASONS
from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    engine,
    exactness,
    exercise,
    whole,
)
from load_tests.scenarios.scorecard.fleet import fair_shares

PROMISE = "goodput holds, the excess is shed"
SLO = SloSpec(name="default", ttft_s=1.0, itl_s=0.3)
REFUSED = (429, 503)
_SAMPLE_S = 0.05
_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """`near` and `above`: loads as multiples of the measured capacity; the goodput peak is at one of `near`.
    `shares`: also measure fairness among tenants and beside long prompts."""

    workers: int = 2
    prompt_tokens: int = 100
    capacity_asks: int = 200
    window_s: float = 30.0
    near: tuple[float, ...] = (0.8, 1.0, 1.25)
    above: tuple[float, ...] = (2.0, 5.0)
    shares: fair_shares.Size | None = field(default_factory=fair_shares.Size)


@dataclass(frozen=True, slots=True)
class Window:
    """The result of one load: `offered` and `good` are requests per second."""

    load: float
    offered: float
    good: float
    resident: int
    outcomes: tuple[Outcome, ...]

    @property
    def refused(self) -> list[Outcome]:
        """Requests that were refused with a retry time."""
        return [each for each in self.outcomes if each.status in REFUSED]

    @property
    def served(self) -> list[Outcome]:
        """All other requests."""
        return [each for each in self.outcomes if each.status not in REFUSED]


def deployment() -> Deployment:
    """Prompts that take 0.1 s on average, and engines whose steps are no longer than that."""
    sim = {"prefill_tokens_per_s": 1000.0, "decode_step_per_seq_s": 0.0}
    spec = engine(max_num_batched_tokens=112, sim=sim)
    return whole(spec, slo=(SLO,))


def is_good(outcome: Outcome) -> bool:
    """Whether a request got all its tokens within the SLO of its class."""
    if not outcome.exact or outcome.ttft_s > SLO.ttft_s:
        return False
    gaps = max(1, outcome.ask.tokens - 1)
    return (outcome.times_s[-1] - outcome.times_s[0]) / gaps <= SLO.itl_s


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    async with exercise(trial, deployment(), Layout({"both": size.workers})) as fleet:
        capacity = await _capacity(trial, fleet, size)
        trial.say(f"capacity {capacity:.1f} requests a second")
        near = [await _window(trial, fleet, size, load, capacity) for load in size.near]
        above = [await _window(trial, fleet, size, load, capacity) for load in size.above]
    figures = _figures(capacity, near, above)
    if size.shares is not None:
        figures += await fair_shares.measure(trial, size.shares)
    return figures


async def _capacity(trial: Trial, fleet: Fleet, size: Size) -> float:
    """Requests per second that are served under saturation."""
    asks = fair_shares.varied(trial.rng(1), trial.rng(2), size.prompt_tokens)
    work = itertools.islice(asks, size.capacity_asks)
    began = trial.clock.now()
    outcomes = await closed_loop(fleet.address, work, 6 * size.workers, trial.clock)
    return sum(each.exact for each in outcomes) / (trial.clock.now() - began)


async def _window(trial: Trial, fleet: Fleet, size: Size, load: float, capacity: float) -> Window:
    """Send `load` times the capacity for a while. Raise NotProven if it could not be sent."""
    salt = 10 + round(100 * load)
    rate = load * capacity
    work = fair_shares.varied(trial.rng(salt), trial.rng(salt + 2), size.prompt_tokens)
    sending = OpenLoop([fleet.address], work, rate, clock=trial.clock, rng=trial.rng(salt + 1))
    pid = fleet.routers[0].process.pid
    began, peak = trial.clock.now(), resident_bytes(pid)
    sending.start()
    while trial.clock.now() < began + size.window_s:
        await trial.clock.sleep(_SAMPLE_S)
        peak = max(peak, resident_bytes(pid))
    took = trial.clock.now() - began
    outcomes = await sending.stop(_GRACE_S)
    offered, good = len(outcomes) / took, sum(map(is_good, outcomes)) / took
    if sending.skipped:
        raise NotProven(f"{sending.skipped} requests of the load were not sent")
    made = Window(load, offered, good, max(peak, resident_bytes(pid)), tuple(outcomes))
    trial.say(f"{load:g} of it: {offered:.1f} offered, {good:.1f} good, {len(made.refused)} refused, "
              f"{made.resident / 2**20:.0f} MiB")  # fmt: skip
    return made


def _figures(capacity: float, near: Sequence[Window], above: Sequence[Window]) -> list[Figure]:
    best = max(near, key=lambda window: window.good)
    resident = max(window.resident for window in near)
    figures = []
    for window in above:
        times, refused = f"at {window.load:g} times the load", window.refused
        if window.offered < 0.8 * window.load * capacity or not refused:
            raise NotProven(f"{window.offered:.1f} requests a second were offered, {len(refused)} refused")
        took = [(each.ended_s or 0.0) - each.sent_s for each in refused]
        codes = Counter(each.error for each in refused)
        untold = [each for each in refused if not each.retry_after_s or each.error not in REASONS]
        figures += [
            Figure(f"{times}: goodput, of its peak", 100 * window.good / best.good, "%", "higher", 90.0,
                   f"{window.good:.1f} of {window.offered:.1f} requests a second; the peak was "
                   f"{best.good:.1f} at {best.load:g} of the capacity, {capacity:.1f}"),
            Figure(f"{times}: p99 until a refusal is answered", quantile(took, 0.99) * 1e3, "ms", "lower",
                   50.0, f"{len(refused)} refused, median {quantile(took, 0.5) * 1e3:.1f} ms; "
                   + ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))),
            Figure(f"{times}: refusals without Retry-After or a code", len(untold), "requests", "lower", 0.0),
            Figure(f"{times}: growth of the router's memory over that at its peak",
                   100 * (window.resident / resident - 1), "%", "lower", 20.0,
                   f"{window.resident / 2**20:.0f} and {resident / 2**20:.0f} MiB"),
            exactness(window.served, f"{times}, of those that were not refused"),
        ]  # fmt: skip
    return figures
