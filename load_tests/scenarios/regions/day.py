"""A day over all regions, event by event, with production decisions: which cell serves, what tenants may use,
how many replicas a cell has, and when a request may run again.

Cells report once a second over links that take half a round trip. A message that cannot get through is lost.
A request that its cell cannot deliver is tried in another cell after `CONNECT_S`. One that runs in a cell
that is lost or cut off runs again after the times of the fence; a cell that is cut off has stopped it by
then.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

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
from kvasir_router.regions.choice import CellRequest, offers_of
from kvasir_router.regions.fencing import FenceRules
from kvasir_router.regions.limits import Admitted
from kvasir_router.regions.reports import CellReport, decode_report, encode_report
from kvasir_router.regions.view import RegionView
from load_tests.scenarios.regions.cell import (
    POOL,
    PREFILLED,
    READY,
    SERVED,
    STREAMED,
    CellReplica,
    SimCell,
    Work,
)
from load_tests.scenarios.regions.metered import MeteredTenant
from load_tests.scenarios.regions.selection import Select
from load_tests.scenarios.regions.world import (
    BEGIN_REPLICAS,
    HOME,
    MOST_REPLICAS,
    PROMISED_ITL_S,
    PROMISED_TTFT_S,
    REGIONS,
    SEATS,
    Outage,
    SimTraffic,
    World,
    replica_times,
    rtt_s,
)

CONNECT_S = 1.0
PATIENCE_S = 30.0
PLAN_S, INTERVAL_S = 15, 60.0
TAIL_S = 1800
FENCE = FenceRules()
CALL = 3
NAMES = tuple(each.name for each in REGIONS)
NUMBERS = {name: number for number, name in enumerate(NAMES)}
AREAS = {each.name: frozenset(other.name for other in REGIONS if other.area == each.area) for each in REGIONS}


@dataclass(slots=True)
class DayCounts:
    """What happened, beside the requests' own times."""

    cross: int = 0
    executions: int = 0
    violations: int = 0
    doubles: int = 0
    repeated: int = 0
    unheard: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    replicas: Counter[int] = field(default_factory=Counter)


def _planner(cell: SimCell) -> ScalingLoop:
    """The planner of a cell, with its defaults but for the interval."""
    pool = PoolSpec(
        name=POOL,
        role=Role.BOTH,
        replicas=BEGIN_REPLICAS,
        scaling=PoolScalingSpec(min=1, max=MOST_REPLICAS),
        engine=EngineSpec(max_num_seqs=SEATS),
    )
    deployment = Deployment(
        model=ModelSpec(source="kvasir-tiny", served_name=SERVED),
        slo=(SloSpec(name="default", ttft_s=PROMISED_TTFT_S, itl_s=PROMISED_ITL_S),),
        pools=(pool,),
        disaggregation="never",
        scaling=ScalingSpec(interval_s=INTERVAL_S),
    )
    cell.epoch = "day"
    return ScalingLoop(deployment, cell, epoch=cell.epoch, tell=lambda *_args, **_details: None)


class RegionDay:
    """One run. `works` are all requests that came, `counts` what happened beside their own times."""

    def __init__(self, world: World, traffic: SimTraffic, select: Select) -> None:
        self.world, self.traffic, self._select = world, traffic, select
        self.counts = DayCounts()
        self.works: list[Work] = []
        self._events: list[tuple[float, int, int, Any, Any, int]] = []
        self._numbers = count()
        times = replica_times()
        self.cells = [SimCell(i, name, times, self._push, self._ended) for i, name in enumerate(NAMES)]
        self._loops = [_planner(cell) for cell in self.cells]
        self._views = [RegionView(other for other in NAMES if other != name) for name in NAMES]
        self._network = [{other: rtt_s(i, j) for j, other in enumerate(NAMES)} for i, _ in enumerate(NAMES)]
        mean = len(traffic) / max(1e-9, sum(traffic.prefill_s))
        tokens = (sum(traffic.prompt) + sum(traffic.output)) / max(1, len(traffic))
        per_s = 0.6 * tokens * mean
        self._prices = [times.dollars_per_hour * each.price / (per_s * 3600) * 1e6 for each in REGIONS]
        self.metered = MeteredTenant(world, lambda at, what: self._push(at, CALL, what, None, 0))
        self._running: dict[int, SimCell] = {}
        self._broken = False
        self._next = 0
        for cell in self.cells:
            cell.serve(BEGIN_REPLICAS)

    @property
    def dollars(self) -> float:
        """What all replicas cost."""
        hour = replica_times().dollars_per_hour
        return sum(
            cell.paid_s / 3600 * hour * region.price for cell, region in zip(self.cells, REGIONS, strict=True)
        )

    def _reaches(self, first: int, second: int, now: float) -> bool:
        return not self._broken or self.world.reaches(first, second, now)

    def _lost(self, region: int, now: float) -> bool:
        return self._broken and self.world.lost(region, now)

    # -- time --------------------------------------------------------------------------------------

    def run(self) -> RegionDay:
        """Run the day, and until all requests have ended; costs are those of the day."""
        length = int(self.world.length_s)
        for second in range(length):
            self._until(float(second))
            self._second(second)
        self._until(float(length))
        for cell in self.cells:
            cell.now = float(length)
            cell.close()
        for second in range(length, length + TAIL_S):
            if not self._running:
                break
            self._until(float(second))
            self._exchange(second)
        return self

    def _push(self, at: float, kind: int, what: Any, about: Any, token: int) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), kind, what, about, token))

    def later(self, at: float, what: Callable[[float], None]) -> None:
        """Call at that time."""
        self._push(at, CALL, what, None, 0)

    def _until(self, until: float) -> None:
        """Take all arrivals and events before that time."""
        events, times = self._events, self.traffic.at_s
        while True:
            arrives = times[self._next] if self._next < len(times) else float("inf")
            due = events[0][0] if events else float("inf")
            if min(arrives, due) >= until:
                return
            if arrives <= due:
                self._arrive(self._next, arrives)
                self._next += 1
                continue
            at, _, kind, what, about, token = heapq.heappop(events)
            if kind == CALL:
                what(at)
                continue
            what.now = at
            self._of_replica(kind, what, about, token)

    @staticmethod
    def _of_replica(kind: int, cell: SimCell, replica: CellReplica, token: int) -> None:
        if kind == STREAMED:
            if replica.version == token:
                cell.streamed(replica)
        elif kind == PREFILLED:
            if replica.prompt is not None and replica.prompt.number == token:
                cell.prefilled(replica)
        elif kind == READY:
            cell.ready(replica)

    def _second(self, second: int) -> None:
        now = float(second)
        self._broken = any(outage.during(now) for outage in self.world.outages)
        for cell in self.cells:
            cell.now = now
        for outage in self.world.outages:
            if outage.begin_s == second:
                self._breaks(outage, now)
            elif outage.end_s == second and outage.lost:
                self._returns(outage)
        self._exchange(second)
        self.metered.second(now)
        if second % PLAN_S:
            return
        for cell, loop in zip(self.cells, self._loops, strict=True):
            if not self._lost(cell.number, now):
                loop.take(cell.demand(), now)
                loop.step(now)
                self.counts.replicas[cell.number] = max(self.counts.replicas[cell.number], cell.serving)

    def _exchange(self, second: int) -> None:
        """Every cell reports to all that it reaches."""
        now = float(second)
        for cell in self.cells:
            cell.now = now
            if self._lost(cell.number, now):
                continue
            report = decode_report(encode_report(self._report(cell, second + 1)))
            for other in range(len(REGIONS)):
                if other != cell.number and self._reaches(cell.number, other, now):
                    self._hear(self._views[other], report, now + rtt_s(cell.number, other) / 2)

    def _hear(self, view: RegionView, report: CellReport, at: float) -> None:
        self.later(at, lambda now: self._heard(view, report, now))

    @staticmethod
    def _heard(view: RegionView, report: CellReport, now: float) -> None:
        view.heard(report, now)

    def _report(self, cell: SimCell, sequence: int) -> CellReport:
        return CellReport(cell.name, 1, sequence, (cell.model_report(self._prices[cell.number]),))

    # -- requests ----------------------------------------------------------------------------------

    def _arrive(self, number: int, now: float) -> None:
        traffic = self.traffic
        work = Work(
            number,
            now,
            traffic.region[number],
            prompt=traffic.prompt[number],
            output=traffic.output[number],
            prefill_s=traffic.prefill_s[number],
        )
        work.resident, work.metered = traffic.resident[number], traffic.metered[number]
        self.works.append(work)
        if work.metered:
            self._metered(work, now, asked=False)
        else:
            self._choose(work, now)

    def _metered(self, work: Work, now: float, *, asked: bool) -> None:
        """Let the tenant's limit decide, at the cell at which the request arrives."""
        entry = self._entry(work, now)
        if entry is None:
            work.outcome = "unserved"
            return
        tokens = work.prompt + work.output
        found = self.metered.take(entry, tokens, now)
        if found is Admitted.ASK and not asked:
            self.metered.ask(entry, now)
            self.later(now + rtt_s(entry, HOME) + 0.001, lambda at: self._metered(work, at, asked=True))
            return
        self.metered.count(entry, tokens, now, admitted=found is Admitted.YES)
        if found is Admitted.YES:
            self._choose(work, now)
        else:
            work.outcome = "limited"

    def _entry(self, work: Work, now: float) -> int | None:
        """Return the cell that the client reaches first: its own, or the next one that exists. A tenant with
        data residency has addresses in its area only."""
        home = work.entry
        if not self._lost(home, now):
            return home
        area = AREAS[NAMES[home]]
        able = [
            i
            for i, name in enumerate(NAMES)
            if not self._lost(i, now) and (name in area or not work.resident)
        ]
        return min(able, key=lambda i: rtt_s(home, i), default=None)

    def _choose(self, work: Work, now: float) -> None:
        entry = self._entry(work, now)
        if entry is None:
            work.outcome = "unserved"
            return
        own, view = self.cells[entry], self._views[entry]
        residency = AREAS[NAMES[work.entry]] if work.resident else None
        request = CellRequest(SERVED, work.prompt, work.left, PROMISED_TTFT_S, residency, avoid=work.tried)
        offers = offers_of(view, self._report(own, 0), request, self._network[entry], now)
        name = self._select(request, offers)
        if name is None:
            self._unserved(work, now)
            return
        cell = self.cells[NUMBERS[name]]
        if residency is not None and not {name, NAMES[entry]} <= residency:
            self.counts.violations += 1
        self.counts.executions += 1
        self.counts.cross += cell.number != work.entry
        work.network_s = (rtt_s(work.entry, entry) + rtt_s(entry, cell.number)) / 2
        if cell is not own:
            view.sent(name, SERVED, "1", work.prompt)
        if work.network_s:
            self.later(now + work.network_s, lambda at: self._deliver(work, entry, cell, at))
        else:
            self._deliver(work, entry, cell, now)

    def _unserved(self, work: Work, now: float) -> None:
        """No cell can serve it: it waits for one, as in the queue of a router."""
        if now - work.at_s > PATIENCE_S:
            work.outcome = "unserved"
            return
        work.tried = frozenset()
        self.later(now + CONNECT_S, lambda at: self._choose(work, at))

    def _deliver(self, work: Work, entry: int, cell: SimCell, now: float) -> None:
        """The request arrives at the cell, or does not."""
        view = self._views[entry]
        if not self._reaches(entry, cell.number, now):
            view.failed(cell.name, now)
            work.tried |= {cell.name}
            self.later(now + CONNECT_S, lambda at: self._choose(work, at))
            return
        if cell.number != entry:
            view.answered(cell.name)
        self.counts.doubles += work.number in self._running
        self._running[work.number] = cell
        work.gate = entry
        cell.now = now
        cell.submit(work)

    def _ended(self, work: Work, now: float) -> None:
        cell = self._running.pop(work.number)
        if not self._reaches(work.gate, cell.number, now):
            self.counts.unheard += 1
            return
        work.ended_s, work.outcome = now + work.network_s, "ok"
        ttft_s = work.first_s - work.at_s
        itl_s = (work.ended_s - work.first_s) / max(1, work.output - 1)
        cell.judged(ttft_s <= PROMISED_TTFT_S and itl_s <= PROMISED_ITL_S)

    # -- outages -----------------------------------------------------------------------------------

    def _breaks(self, outage: Outage, now: float) -> None:
        """Requests between regions that no longer reach each other are stopped in the one and repeated by the
        other; clients of a lost region lose theirs."""
        cut = [
            (self.works[number], cell)
            for number, cell in self._running.items()
            if not self._reaches(self.works[number].gate, cell.number, now)
        ]
        for work, cell in cut:
            if self._lost(work.gate, now):
                work.outcome = "broken"
            else:
                self._repeat_later(work, cell, outage, now)
            if not self._lost(cell.number, now):
                self._stop_later(work, cell, now)
        if outage.lost:
            for region in outage.apart:
                for work in self.cells[region].crash():
                    self._running.pop(work.number, None)

    def _stop_later(self, work: Work, cell: SimCell, now: float) -> None:
        def stop(at: float) -> None:
            if self._running.get(work.number) is cell:
                del self._running[work.number]
                cell.now = at
                cell.cancel(work)

        self.later(now + FENCE.orphan_s, stop)

    def _repeat_later(self, work: Work, cell: SimCell, outage: Outage, now: float) -> None:
        def repeat(at: float) -> None:
            self.counts.repeated += 1
            if work.first_s > outage.begin_s:
                work.first_s = -1.0
            work.tried = frozenset((cell.name,))
            self._choose(work, at)

        self.later(now + FENCE.longest_s, repeat)

    def _returns(self, outage: Outage) -> None:
        """A lost region exists again, without replicas that serve."""
        for region in outage.apart:
            self.cells[region].start(POOL, BEGIN_REPLICAS)
            self._loops[region] = _planner(self.cells[region])
