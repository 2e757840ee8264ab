"""The whole server in virtual time: production decisions over simulated engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.kit.cores import over_cores
from tests.kit.sim.servers import SLO, server, small_pool

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
from kvasir_platform.sim.engine.replica import SIM_MODEL
from kvasir_platform.sim.server.bound import fluid_bound
from kvasir_platform.sim.server.compare import RateSearch, compare
from kvasir_platform.sim.server.results import ServerResult
from kvasir_platform.sim.server.scaling import SimulatedPlanner
from kvasir_platform.sim.server.server import ServerSimulation
from kvasir_platform.sim.server.setting import FleetFault, FleetFaultKind, ServerSetting
from kvasir_router.admission import AdmissionRules

CHAT = "chat:rate=20,duration=20"


def clock() -> float:
    return 0.0


def run(setting: ServerSetting) -> tuple[ServerSimulation, ServerResult]:
    simulation = ServerSimulation(setting, clock=clock)
    return simulation, simulation.run()


def figures(setting: ServerSetting) -> list[object]:
    _, result = run(setting)
    times = result.times
    return [
        *(repr(list(values)) for values in (times.ttft_s, times.tpot_s, times.e2e_s, times.cached)),
        result.failovers,
        result.decisions,
        [(each.worker_id, each.totals.busy_s) for each in result.workers],
    ]


def test_every_request_ends_and_nothing_is_left_on_workers_or_in_the_router() -> None:
    for pools in (
        (small_pool(Role.BOTH, 3),),
        (small_pool(Role.PREFILL, 2), small_pool(Role.DECODE, 2)),
    ):
        simulation, result = run(server(CHAT, *pools))
        assert result.times.ended == result.requests
        assert not any(map(math.isnan, result.times.ttft_s))
        assert simulation.router.fleet.accounted() == {}
        assert simulation.router.fleet.predicted == 0
        assert {each.engine.cache.room for each in simulation.workers.values()} == {1000}
        simulation.router.admission.check(0)


def first_tokens(
    *roles: Role, request_s: float, busy_request_s: float = 0.0, rate: float = 0.1
) -> list[float]:
    """TTFT of two requests, on a worker of each role, whose engines have these times before the first
    step."""
    pools = []
    for pool in (small_pool(role, 1) for role in roles):
        model = pool.replica.model
        reached = replace(model.coefficients, request_s=request_s, busy_request_s=busy_request_s)
        replica = replace(pool.replica, model=replace(model, coefficients=reached))
        pools.append(replace(pool, replica=replica))
    traffic = f"synthetic:rate={rate},requests=2,arrivals=constant,prompt=64,output=400"
    mode = "always" if len(roles) > 1 else "never"
    return list(run(server(traffic, *pools, disaggregation=mode))[1].times.ttft_s)


@pytest.mark.parametrize("roles", [(Role.BOTH,), (Role.PREFILL, Role.DECODE)])
def test_a_request_is_prepared_before_its_first_step_on_each_worker(roles: tuple[Role, ...]) -> None:
    without, with_it = (first_tokens(*roles, request_s=seconds) for seconds in (0.0, 0.25))
    waited = [late - early for early, late in zip(without, with_it, strict=True)]
    assert waited == pytest.approx([0.25 * len(roles)] * 2, abs=1e-6)


def test_preparing_a_request_takes_longer_beside_steps_on_the_same_processors() -> None:
    apart = first_tokens(Role.BOTH, request_s=0.01, busy_request_s=0.5)
    assert max(apart) < 0.1
    first, beside = first_tokens(Role.BOTH, request_s=0.01, busy_request_s=0.5, rate=1.0)
    assert first < 0.1
    assert beside > 0.5


def test_a_setting_determines_the_whole_run() -> None:
    setting = server(
        CHAT,
        small_pool(Role.PREFILL, 2),
        small_pool(Role.DECODE, 2),
        faults=(FleetFault(5.0, FleetFaultKind.CRASH, 1, lasts_s=3.0),),
    )
    assert figures(setting) == figures(setting)
    assert figures(setting) != figures(replace(setting, policy="round_robin"))


def replay_unequal(seeds: Sequence[int]) -> list[int]:
    return [seed for seed in seeds if not replays(seed)]


def replays(seed: int) -> bool:
    kinds = tuple(FleetFaultKind)
    fault = FleetFault(1.0 + seed % 5, kinds[seed % len(kinds)], seed, lasts_s=2.0)
    setting = server("agents:rate=10,duration=6", small_pool(Role.BOTH, 3), seed=seed, faults=(fault,))
    return figures(setting) == figures(setting)


@pytest.mark.timeout(3600)
def test_seeds_replay_exactly(soak: bool) -> None:
    assert not any(over_cores(replay_unequal, range(1_000 if soak else 30)))


def test_prompts_behind_a_shared_prefix_are_found_where_they_are() -> None:
    _, cached = run(server("rag:rate=10,duration=30,prefixes=8", small_pool(Role.BOTH, 3, blocks=4000)))
    assert cached.hit_rate > 0.8
    assert cached.times.predicted / cached.requests > 0.9


def test_a_crash_loses_no_request() -> None:
    setting = server(
        CHAT, small_pool(Role.BOTH, 3), faults=(FleetFault(5.0, FleetFaultKind.CRASH, 0, lasts_s=5.0),)
    )
    simulation, result = run(setting)
    assert result.failovers > 0
    assert result.times.ended == result.requests
    assert len(simulation.workers) == 3
    assert len(result.workers) == 4
    assert not any(map(math.isnan, result.times.e2e_s))


def test_a_slow_worker_is_noticed_and_gets_less() -> None:
    fault = FleetFault(2.0, FleetFaultKind.SLOW, 0, lasts_s=60.0, factor=8.0)
    _, result = run(server(CHAT, small_pool(Role.BOTH, 3), faults=(fault,)))
    slow, *others = sorted(each.totals.generated_tokens for each in result.workers)
    assert slow < 0.7 * min(others)


def test_a_drained_worker_ends_what_it_runs_and_leaves() -> None:
    fault = FleetFault(5.0, FleetFaultKind.DRAIN, 0)
    simulation, result = run(server(CHAT, small_pool(Role.BOTH, 3), faults=(fault,)))
    assert len(simulation.workers) == 2
    assert result.failovers == 0
    assert result.times.ended == result.requests


def test_admission_refuses_what_would_wait_for_too_long() -> None:
    overload = server("synthetic:rate=400,duration=10", small_pool(Role.BOTH, 1))
    endless = AdmissionRules(max_queue=10_000)
    _, everything = run(replace(overload, admission=endless))
    rules = AdmissionRules(max_queue=10_000, ahead_s=0.3, itl_slack=1.0, patience=1.0)
    _, admitted = run(replace(overload, admission=rules))
    assert not everything.refused
    assert set(admitted.refused) == {"wait_too_long"}
    assert admitted.whole_goodput > 1.5 * everything.whole_goodput


@pytest.mark.slow
def test_the_planner_adds_replicas_under_load_and_pays_for_them() -> None:
    pool = small_pool(Role.BOTH, 1)
    deployment = Deployment(
        disaggregation="never",
        model=ModelSpec(source="kvasir-tiny", served_name=SIM_MODEL),
        slo=(SloSpec(name="default", ttft_s=SLO.ttft_s, itl_s=SLO.itl_s),),
        pools=(
            PoolSpec(
                name="both",
                role=Role.BOTH,
                replicas=1,
                scaling=PoolScalingSpec(min=1, max=6),
                engine=EngineSpec(max_num_seqs=64),
            ),
        ),
        scaling=ScalingSpec(interval_s=5.0, start_s=5.0),
    )
    setting = server("synthetic:rate=60,duration=90", pool, deployment=deployment)
    simulation = ServerSimulation(setting, clock=clock)
    SimulatedPlanner(simulation, deployment)
    result = simulation.run()
    assert result.starts >= 2
    assert result.dollars is not None
    assert result.dollars > 2.0 * result.virtual_s / 3600
    _, fixed = run(replace(setting, deployment=None))
    assert result.attainment > fixed.attainment


def test_no_run_is_better_than_the_fluid_bound() -> None:
    setting = server("rag:rate=30,duration=15,prefixes=20", small_pool(Role.BOTH, 2, blocks=3000))
    found = compare(setting, ("round_robin", "cost"), RateSearch(precision=0.2, runs=6), clock=clock)
    assert found.ranks[0].policy == "cost"
    assert all(0.1 < each.of_bound < 1.0 for each in found.ranks)


def test_the_bound_is_that_of_the_scarcer_pool() -> None:
    few = server(CHAT, small_pool(Role.PREFILL, 1), small_pool(Role.DECODE, 30))
    more = server(CHAT, small_pool(Role.PREFILL, 2), small_pool(Role.DECODE, 30))
    assert fluid_bound(few).requests_per_s == fluid_bound(few).by_pool["prefill"]
    assert fluid_bound(more).requests_per_s == pytest.approx(2 * fluid_bound(few).requests_per_s)


def test_frames_of_a_long_run_are_bounded() -> None:
    setting = server(CHAT, small_pool(Role.PREFILL, 1), small_pool(Role.DECODE, 2), frames=20)
    simulation, _ = run(setting)
    timeline = simulation.timeline
    assert timeline is not None
    assert 10 < len(timeline.frames) <= 41
    assert timeline.transfers
    assert {*timeline.pools.values()} == {"prefill", "decode"}
    assert max(each.workers["decode-1"].decoding for each in timeline.frames) > 0
