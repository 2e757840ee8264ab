"""Open and closed loops, and the ramp, on a simulated endpoint in virtual time."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.bench.client.endpoint import BenchCall, CallResult
from kvasir_platform.bench.figures import BenchFigures, figures_of
from kvasir_platform.bench.load import LoadGenerator, LoadLimits
from kvasir_platform.bench.ramp import BenchRamp, RampPlan, RampSearch
from kvasir_platform.bench.slo import BenchSlo
from kvasir_platform.bench.tally import BenchTally
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.workload.distributions import FixedLength
from kvasir_platform.workload.generate import generate
from kvasir_platform.workload.requests import WorkloadRequest
from kvasir_platform.workload.shapes import WorkloadShape

CLOCK = VirtualClock()


class SimulatedEndpoint:
    """Serves `seats` calls at a time, each in `first_s` and then `gap_s` for each further token."""

    def __init__(self, seats: int = 1_000, first_s: float = 0.1, gap_s: float = 0.01) -> None:
        self._seats = asyncio.Semaphore(seats)
        self._first_s = first_s
        self._gap_s = gap_s
        self.running = self.most = 0

    async def send(self, call: BenchCall) -> CallResult:
        result = CallResult(CLOCK.now(), prompt_tokens=5, output_tokens=call.output_tokens)
        self.running += 1
        self.most = max(self.most, self.running)
        async with self._seats:
            await CLOCK.sleep(self._first_s)
            result.chunks.append(CLOCK.now())
            for _ in range(call.output_tokens - 1):
                await CLOCK.sleep(self._gap_s)
                result.chunks.append(CLOCK.now())
        self.running -= 1
        result.ended_s = CLOCK.now()
        return result


def requests(*arrivals: float, output: int = 3) -> list[WorkloadRequest]:
    return [WorkloadRequest(at, 5, output, array("Q")) for at in arrivals]


def loaded(
    wanted: list[WorkloadRequest],
    limits: LoadLimits,
    endpoint: Callable[[], SimulatedEndpoint] = SimulatedEndpoint,
    make: Callable[[WorkloadRequest], str] = lambda _: "text",
) -> tuple[BenchTally, SimulatedEndpoint]:
    async def main() -> tuple[BenchTally, SimulatedEndpoint]:
        tally, served = BenchTally(), endpoint()
        await LoadGenerator(served, CLOCK, make).run(wanted, limits, tally)
        return tally, served

    return run_virtual(main())


def test_an_open_loop_sends_at_its_times_whether_or_not_calls_have_ended() -> None:
    tally, served = loaded(requests(0.0, 0.05, 0.06, 1.0), LoadLimits())
    assert sorted(tally.started) == pytest.approx([0.0, 0.05, 0.06, 1.0])
    assert served.most == 3
    assert list(tally.ttft) == pytest.approx([0.1] * 4)
    assert list(tally.tpot) == pytest.approx([0.01] * 4)
    assert max(tally.lateness) == 0.0
    assert tally.gaps.count == 8
    assert tally.gaps.quantile(0.5) == pytest.approx(0.01, rel=0.005)


def test_an_open_loop_that_may_run_no_more_calls_is_late() -> None:
    tally, served = loaded(requests(0.0, 0.01, 0.02, output=1), LoadLimits(at_a_time=1))
    assert served.most == 1
    assert list(tally.lateness) == pytest.approx([0.0, 0.09, 0.18])
    assert figures_of(tally, BenchSlo()).client_was_late


def test_a_closed_loop_runs_so_many_calls_at_a_time() -> None:
    tally, served = loaded(requests(*[0.0] * 10, output=1), LoadLimits(concurrency=4))
    assert served.most == 4
    assert tally.last_end == pytest.approx(0.3)
    assert tally.succeeded == 10


def test_a_closed_loop_starts_no_call_after_its_duration() -> None:
    tally, _ = loaded(requests(*[0.0] * 100, output=1), LoadLimits(concurrency=2, duration_s=0.25))
    assert tally.succeeded == 6


def test_a_load_that_is_cancelled_has_tallied_what_it_gave_up() -> None:
    async def main() -> BenchTally:
        tally = BenchTally()
        generator = LoadGenerator(SimulatedEndpoint(), CLOCK, lambda _: "text")
        task = asyncio.create_task(generator.run(requests(0.0, 0.3, 9.0), LoadLimits(), tally))
        await CLOCK.sleep(0.35)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return tally

    tally = run_virtual(main())
    assert (tally.succeeded, tally.running, dict(tally.errors)) == (1, 0, {"unfinished": 1})
    assert figures_of(tally, BenchSlo()).slo_share == 0.5


def measured(plan: RampPlan, seats: int, slo: BenchSlo) -> BenchRamp:
    async def at(rate: float) -> BenchFigures:
        shape = WorkloadShape(rate=rate, duration=30.0, output=FixedLength(1), block=512)
        wanted = generate(shape, Random(1)).requests
        tally = BenchTally()
        endpoint = SimulatedEndpoint(seats, first_s=0.5, gap_s=0.0)
        await LoadGenerator(endpoint, CLOCK, lambda _: "text").run(wanted, LoadLimits(), tally)
        return figures_of(tally, slo)

    return run_virtual(RampSearch(plan, at).run())


@pytest.mark.parametrize("start", [0.5, 3.0, 40.0])
def test_a_ramp_finds_where_a_server_breaks(start: float) -> None:
    # Eight seats of half a second each serve 16 requests per second, a little less without a queue.
    found = measured(RampPlan(start=start, precision=0.05), 8, BenchSlo(ttft_s=1.0))
    assert 12.0 < found.knee < 16.5
    assert found.broken is not None
    assert found.knee < found.broken <= found.knee * 1.05
    assert found.best_goodput > 10.0


def test_a_server_that_never_holds_the_slo_has_no_knee() -> None:
    found = measured(RampPlan(start=1.0), 8, BenchSlo(ttft_s=0.1))
    assert found.knee == 0.0
    assert [each.rate for each in found.points] == [0.125, 0.25, 0.5, 1.0]


def test_a_server_that_holds_the_slo_at_every_rate_does_not_break() -> None:
    found = measured(RampPlan(start=1.0, most=20.0), 10_000, BenchSlo(ttft_s=1.0))
    assert (found.knee, found.broken) == (20.0, None)


@given(st.floats(0.01, 5_000), st.floats(0.1, 50))
def test_a_ramp_ends_within_its_precision_of_any_limit(limit: float, start: float) -> None:
    plan = RampPlan(start=start, least=0.001, most=20_000, precision=0.1)

    async def at(rate: float) -> BenchFigures:
        tally = BenchTally()
        held = rate <= limit
        tally.begin(0.0)
        tally.end(CallResult(0.0, 1.0, array("d", [0.0 if held else 0.9])), 1, 1)
        return figures_of(tally, BenchSlo(ttft_s=0.5))

    found = asyncio.run(RampSearch(plan, at).run())
    assert len(found.points) <= 40
    if found.knee:
        assert found.knee <= limit <= found.knee * 1.1 * 1.000001
    else:
        assert limit < 2 * plan.least


@pytest.mark.parametrize(
    "values", [{"start": 0.0}, {"start": 0.01}, {"step": 1.0}, {"met": 1.5}, {"precision": 0.0}]
)
def test_a_plan_that_cannot_end_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"above|from"):
        RampPlan(**values)
