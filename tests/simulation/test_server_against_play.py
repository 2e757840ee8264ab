"""The simulated server and the predictor that is measured against real engines say the same.

load_tests/scenarios/truth measures how well the performance model predicts, played by
tests.kit.sim.virtual_batching, which shares no code with the simulator.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest
from tests.kit.sim.servers import server, small_pool
from tests.kit.sim.virtual_batching import EnginesApart, VirtualRequest, play

from kvasir.core.requests import Role
from kvasir_platform.sim.engine.options import BatchOptions
from kvasir_platform.sim.engine.replica import ReplicaLinks
from kvasir_platform.sim.server.server import ServerSimulation
from kvasir_platform.sim.server.setting import SimulatedPool

LINKS = ReplicaLinks(fixed_s=0.004, byte_s=1e-10)


def pool(role: Role) -> SimulatedPool:
    """A worker with memory for all that comes, which takes 20 ms to prepare a request, 40 beside a step."""
    made = small_pool(role, 1, blocks=100_000, options=BatchOptions(most=256, step_tokens=2048))
    model = made.replica.model
    shape = replace(model.shape, max_num_seqs=256, max_num_batched_tokens=2048)
    reached = replace(model.coefficients, request_s=0.02, busy_request_s=0.04)
    alike = replace(model, shape=shape, coefficients=reached)
    return replace(made, replica=replace(made.replica, model=alike, links=LINKS))


@pytest.mark.parametrize("rate", [1, 4, 8])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_the_server_says_what_the_measured_predictor_says(rate: int, apart: bool) -> None:
    roles = (Role.PREFILL, Role.DECODE) if apart else (Role.BOTH,)
    pools = tuple(pool(role) for role in roles)
    traffic = f"synthetic:rate={rate},requests=300,prompt=700/1900,output=120/300"
    setting = server(traffic, *pools, disaggregation="always" if apart else "never", report_delay_s=0.0)
    times = ServerSimulation(setting, clock=lambda: 0.0).run().times
    first, last = (made.replica.model for made in (pools[0], pools[-1]))
    engines = EnginesApart(first, last, LINKS.fixed_s, LINKS.byte_s) if apart else first
    requests = [
        VirtualRequest(each.arrival_s, each.prompt_tokens, each.output_tokens)
        for each in setting.workload.requests
    ]
    outcomes = play(requests, engines)
    assert not any(map(math.isnan, times.ttft_s))
    # Of the two, only the server pulls KV between two steps, as vLLM does.
    near = 0.06 if apart else 0.03
    assert fmean(times.ttft_s) == pytest.approx(fmean(each.ttft_s for each in outcomes), rel=near)
    itl_s = fmean(each.itl_s for each in outcomes if each.tokens > 1)
    assert fmean(each for each in times.tpot_s if not math.isnan(each)) == pytest.approx(itl_s, rel=0.03)
