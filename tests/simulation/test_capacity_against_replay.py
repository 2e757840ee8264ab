"""The queue that plans compute with agrees with trace replay, which runs the router's own decisions.

A simulated replica gets the times of the same engine model. Bounds are relative, of the mean TTFT, the 95th
percentile of it, and the mean ITL, at moderate and high load; they hold the noise of a few thousand requests.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from kvasir.core.identity import Hardware
from kvasir.core.requests import SloClass
from kvasir.hardware.offers import catalogue
from kvasir.performance.coefficients import DATA_SHEET
from kvasir.performance.step import EngineModel, PromptChunk, StepWork
from kvasir.sizing.shape import EngineShape
from kvasir_platform.capacity.assumed import measured
from kvasir_platform.capacity.engines import EngineOption, engine_option, gpu_choice
from kvasir_platform.capacity.models import known_model
from kvasir_platform.capacity.pools import (
    Experience,
    Mode,
    Pair,
    ServiceTarget,
    SizedEngine,
    aggregated,
    disaggregated,
)
from kvasir_platform.capacity.search import PlanRequest, search
from kvasir_platform.capacity.traffic import LengthSpread, TrafficProfile, stated_traffic
from kvasir_platform.sim.replay.outcome import ReplayOutcome
from kvasir_platform.sim.replay.replay import Setting, TraceReplay
from kvasir_platform.sim.replay.replica import SimReplica
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS
from kvasir_platform.workload.requests import Workload, WorkloadRequest
from kvasir_router.decide import make_policy

TARGET = ServiceTarget(ttft_s=2.0, itl_s=0.1)
LINK = 10e9
BOUND = 0.15
"""Relative error of the mean TTFT and of the mean ITL; tails have half as much again."""


def option() -> EngineOption:
    model = known_model("llama-3.1-8b")
    assert model is not None
    (h100,) = (each for each in catalogue() if each.name == "H100")
    # Trace replay has no time of a request before its first step.
    hardware = gpu_choice(h100, assumed=measured(replace(DATA_SHEET, request_s=0.0), 0.0))
    shape = EngineShape(max_model_len=16_384, max_num_seqs=256, max_num_batched_tokens=2048)
    return engine_option(model, hardware, shape)


def traffic(rate: float) -> TrafficProfile:
    return stated_traffic(
        rate=rate,
        peak=rate,
        prompt=LengthSpread(2500, 7000),
        output=LengthSpread(150, 400),
        prefix_share=0.0,
    )


def simulated(engine: EngineModel) -> SimReplica:
    """The same times, linear in streams and tokens as the simulator has them."""
    far, chunk = 2600, 2048

    def prompt(tokens: int, context: int) -> float:
        return engine.step(StepWork((PromptChunk(tokens, context),))).seconds

    stream = (engine.decode(101, 1).seconds - engine.decode(1, 1).seconds) / 100
    token = (engine.decode(100, far).seconds - engine.decode(100, 1).seconds) / (100 * (far - 1))
    fixed = engine.decode(1, 1).seconds - stream
    context = (prompt(chunk, 4096) - prompt(chunk, 0)) / (chunk * 4096)
    return SimReplica(
        hardware=Hardware("H100", 1, 989e12, 3.35e12),
        model_parameters=8_000_000_000,
        model_bytes=16_000_000_000,
        layers=32,
        kv_heads=8,
        head_size=128,
        prefill_token_s=(prompt(chunk, 0) - fixed) / chunk - context * chunk / 2,
        prefill_context_s=context,
        step_fixed_s=fixed,
        step_stream_s=stream,
        step_kv_token_s=token,
        step_tokens=chunk,
        most_streams=256,
        device_blocks=int(450_000 / TRACE_BLOCK_TOKENS),
        cpu_blocks=0,
        cpu_byte_s=0.0,
        transfer_fixed_s=0.005,
        transfer_byte_s=1 / LINK,
    )


def requests(profile: TrafficProfile, count: int, seed: int) -> Workload:
    """A Poisson process of requests with these lengths, which share nothing."""
    rng, at, made = Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(profile.rate)
        length = rng.choice(profile.lengths)
        made.append(WorkloadRequest(at, round(length.prompt), max(2, round(length.output)), array("Q")))
    return Workload(tuple(made), TRACE_BLOCK_TOKENS)


def replayed(
    profile: TrafficProfile,
    *,
    target: ServiceTarget = TARGET,
    seed: int = 7,
    workers: int = 0,
    prefill_workers: int = 0,
    decode_workers: int = 0,
) -> ReplayOutcome:
    setting = Setting(
        trace=requests(profile, 2000, seed),
        replica=simulated(option().engine),
        slo=SloClass("slo", ttft_s=target.ttft_s, itl_s=target.itl_s),
        speed_up=1.0,
        report_delay_s=0.001,
        workers=workers,
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
    )
    mode = "always" if prefill_workers else "never"
    return TraceReplay(setting, make_policy("cost", mode, Random(seed))).run()


def compare(seen: Experience, found: ReplayOutcome) -> dict[str, float]:
    """The relative errors."""
    ttft = sorted(found.ttft_s)
    itl = [each for each in found.itl_s if not math.isnan(each)]
    return {
        "ttft": seen.ttft_mean_s / fmean(ttft) - 1,
        "ttft p95": seen.ttft_s / ttft[int(0.95 * len(ttft))] - 1,
        "itl": seen.itl_mean_s / fmean(itl) - 1,
        "itl p95": seen.itl_s / sorted(itl)[int(0.95 * len(itl))] - 1,
    }


def check(errors: dict[str, float]) -> None:
    assert abs(errors["ttft"]) <= BOUND, errors
    assert abs(errors["itl"]) <= BOUND, errors
    assert abs(errors["ttft p95"]) <= 1.5 * BOUND, errors
    assert abs(errors["itl p95"]) <= 1.5 * BOUND, errors


@pytest.mark.parametrize(("replicas", "rate"), [(1, 2.0), (1, 6.0), (4, 14.0), (4, 24.0)])
def test_replicas_that_do_both_parts_are_as_fast_as_the_formulas_say(replicas: int, rate: float) -> None:
    profile = traffic(rate)
    seen = aggregated(SizedEngine(option(), profile), replicas, rate, TARGET)
    check(compare(seen, replayed(profile, workers=replicas)))


@pytest.mark.parametrize(("pools", "rate"), [((1, 1), 2.0), ((3, 2), 10.0)])
def test_prefill_and_decode_apart_are_as_fast_as_the_formulas_say(
    pools: tuple[int, int], rate: float
) -> None:
    profile = traffic(rate)
    engine = SizedEngine(option(), profile)
    seen = disaggregated(Pair(engine, engine, LINK), pools, rate, TARGET)
    check(compare(seen, replayed(profile, prefill_workers=pools[0], decode_workers=pools[1])))


@pytest.mark.parametrize(
    ("mode", "rate", "target"),
    [
        (Mode.AGGREGATED, 20.0, ServiceTarget(ttft_s=1.0, itl_s=0.03, attainment=0.95)),
        (Mode.AGGREGATED, 40.0, ServiceTarget(ttft_s=0.5, itl_s=0.04, attainment=0.95)),
        (Mode.DISAGGREGATED, 40.0, ServiceTarget(ttft_s=0.5, itl_s=0.04, attainment=0.95)),
    ],
    ids=["tight-itl", "tight-ttft", "apart"],
)
def test_a_plan_s_replicas_meet_the_slo_in_replay_and_fewer_do_not(
    mode: Mode, rate: float, target: ServiceTarget
) -> None:
    profile, engine = traffic(rate), option()
    found = search(
        PlanRequest(engine.model, (engine.hardware,), profile, target, 16_384, (mode,), link_bytes_per_s=LINK)
    )
    plan = found.best
    assert plan is not None
    assert {pool.engine.option.devices for pool in plan.pools} == {1}
    replicas = [pool.replicas for pool in plan.pools]
    enough = replayed(profile, target=target, **pools_of(mode, replicas))
    assert enough.met == pytest.approx(plan.peak.met, abs=0.03)
    assert enough.met >= target.attainment - 0.01
    fewer = replayed(profile, target=target, **pools_of(mode, [each - 1 for each in replicas]))
    assert fewer.met < target.attainment


def pools_of(mode: Mode, replicas: list[int]) -> dict[str, int]:
    if mode is Mode.AGGREGATED:
        return {"workers": replicas[0]}
    return {"prefill_workers": replicas[0], "decode_workers": replicas[1]}
