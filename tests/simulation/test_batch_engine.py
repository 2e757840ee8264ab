"""The engine of `kvasir sim`: equal to a plain engine that runs every step, with each of its options."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from tests.kit.sim.plain_engine import PlainEngine

from kvasir.core.requests import Leg
from kvasir.hardware.gpus import gpu_named
from kvasir.performance.device import device_of
from kvasir.performance.step import EngineModel, PromptChunk
from kvasir.performance.work import dense_work
from kvasir.sizing.shape import EngineShape
from kvasir_platform.sim.engine.batch_engine import BatchEngine
from kvasir_platform.sim.engine.options import Batching, BatchOptions, Preemption, SpeculationOptions
from kvasir_platform.sim.engine.replica import EngineReplica, ReplicaMemory
from kvasir_platform.sim.engine.sequence import EngineLeg
from kvasir_platform.sim.engine.step_costs import StepCosts
from kvasir_platform.sim.engine.step_run import GapBins
from kvasir_platform.sim.replay.cache import BlockCache
from kvasir_platform.workload.requests import block_name

BLOCK = 16
GPU = gpu_named("H100")
assert GPU is not None
MODEL = EngineModel(
    dense_work(parameters=8e9, layers=32, hidden=4096, kv_elements=2048), device_of(GPU), EngineShape()
)
ROOMY = BatchOptions(most=8, step_tokens=512, prefix_cache=False)


def replica(options: BatchOptions, blocks: int = 10_000, cpu_blocks: int = 0) -> EngineReplica:
    return EngineReplica(MODEL, ReplicaMemory(blocks, cpu_blocks, BLOCK), options)


def engine(made: EngineReplica, parents: dict[int, int] | None = None) -> BatchEngine:
    memory = made.memory
    return BatchEngine("w", made, BlockCache(memory.blocks, memory.cpu_blocks, parents or {}))


def leg(number: int, prompt: int, output: int, at: float = 0.0, kind: Leg = Leg.FULL) -> EngineLeg:
    return EngineLeg(number, kind, prompt, output, array("Q"), at)


def traffic(count: int, seed: int, gap: float) -> list[EngineLeg]:
    rng, at, made = Random(seed), 0.0, []
    for number in range(count):
        made.append(leg(number, rng.randrange(1, 600), rng.randrange(1, 200), at))
        at += rng.random() * 2 * gap
    return made


def run(target: BatchEngine, legs: Sequence[EngineLeg]) -> list[EngineLeg]:
    """Play all to the end; the legs in the order in which they ended."""
    ended: list[EngineLeg] = []
    waiting = list(legs)
    while waiting or target.next_event_s < math.inf:
        if waiting and waiting[0].queued_s <= target.next_event_s:
            target.submit(waiting[0], waiting.pop(0).queued_s)
        else:
            ended.extend(target.advance(target.next_event_s).ended)
    return ended


CASES = {
    "continuous": (ROOMY, 10_000),
    "a budget below one prompt": (replace(ROOMY, step_tokens=100), 10_000),
    "prompts whole": (replace(ROOMY, chunked=False), 10_000),
    "static": (replace(ROOMY, batching=Batching.STATIC), 10_000),
    "dynamic": (replace(ROOMY, batching=Batching.DYNAMIC, wait_s=0.2), 10_000),
    "static with little memory": (replace(ROOMY, batching=Batching.STATIC), 90),
    "speculation": (replace(ROOMY, speculation=SpeculationOptions(0.7, 3, 0.05)), 10_000),
    "recompute": (ROOMY, 60),
    "drop": (replace(ROOMY, preemption=Preemption.DROP), 60),
    "swap": (replace(ROOMY, preemption=Preemption.SWAP), 60),
    "speculation with little memory": (replace(ROOMY, speculation=SpeculationOptions(0.8, 4)), 60),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_the_engine_equals_one_that_runs_every_step(case: str, seed: int) -> None:
    options, blocks = CASES[case]
    made = replica(options, blocks)
    gap = 0.004 if blocks < 100 else 0.02
    legs = traffic(40, seed, gap)
    expected = PlainEngine(made, legs).run()
    target = engine(made)
    ended = run(target, legs)
    assert len(ended) == len(legs)
    for each in legs:
        wanted = expected[each.number]
        assert each.first_s == pytest.approx(wanted.first, rel=1e-9), each.number
        assert each.finished_s == pytest.approx(wanted.last, rel=1e-9), each.number
    assert target.cache.room == blocks
    if blocks == 60:
        assert target.totals.preemptions > 0


def names(first: int, blocks: int) -> array[int]:
    return array("Q", [block_name(first + i) for i in range(blocks)])


def parents_of(*chains: array[int]) -> dict[int, int]:
    return {name: 0 if i == 0 else chain[i - 1] for chain in chains for i, name in enumerate(chain)}


def prompts(*chains: array[int], gap: float, output: int = 4) -> list[EngineLeg]:
    return [
        EngineLeg(i, Leg.FULL, len(chain) * BLOCK + 1, output, chain, i * gap)
        for i, chain in enumerate(chains)
    ]


def test_a_prompt_is_computed_behind_the_prefix_that_an_earlier_one_left() -> None:
    chain = names(0, 20)
    target = engine(replica(replace(ROOMY, prefix_cache=True)), parents_of(chain))
    first, second = prompts(chain, chain, gap=1.0)
    run(target, [first, second])
    assert (first.cached_tokens, second.cached_tokens) == (0, 20 * BLOCK)
    assert second.first_s - second.queued_s == pytest.approx(
        StepCosts(MODEL, ROOMY).prompts([PromptChunk(1, 20 * BLOCK, True)], 0, 0.0)
    )
    assert target.cache.room == 10_000


def test_blocks_evicted_to_cpu_memory_are_loaded_and_not_computed() -> None:
    one, other = names(0, 20), names(100, 20)
    made = replica(replace(ROOMY, prefix_cache=True), blocks=24, cpu_blocks=100)
    target = engine(made, parents_of(one, other))
    *_, again = legs = prompts(one, other, one, gap=1.0)
    run(target, legs)
    assert again.hit.blocks == 20
    assert 0 < again.hit.from_cpu < 20
    assert again.load_s == pytest.approx(
        again.hit.from_cpu * BLOCK * made.kv_token_bytes * made.links.cpu_byte_s
    )
    assert target.load.tiers[0].loaded_blocks == again.hit.from_cpu


def test_a_pulled_prompt_waits_for_its_bytes_and_for_those_before_it() -> None:
    made = replica(ROOMY)
    target = engine(made)
    legs = [leg(i, 320, 5, kind=Leg.DECODE) for i in range(2)]
    run(target, legs)
    bytes_s = 320 * made.kv_token_bytes * made.links.byte_s
    assert legs[0].computed_s == pytest.approx(bytes_s + made.links.fixed_s)
    # The second one joins the step after the one that runs when it is there.
    assert 0 <= legs[1].computed_s - 2 * bytes_s - made.links.fixed_s < 0.01
    assert target.totals.prefilled_tokens == 0


def test_a_prefill_leg_keeps_its_blocks_until_they_have_been_pulled() -> None:
    target = engine(replica(ROOMY))
    only = leg(0, 320, 5, kind=Leg.PREFILL)
    run(target, [only])
    assert target.cache.room == 10_000 - 21
    target.let_go(only, only.finished_s)
    assert target.cache.room == 10_000


def test_a_slow_engine_takes_longer_and_one_that_stops_returns_what_ran() -> None:
    ends = []
    for slowness in (1.0, 3.0):
        target = engine(replica(ROOMY))
        target.slowness = slowness
        only = leg(0, 320, 50)
        run(target, [only])
        ends.append(only.finished_s)
    assert ends[1] == pytest.approx(3.0 * ends[0])
    target = engine(replica(ROOMY))
    running, waiting = leg(0, 320, 1000), leg(1, 320, 10)
    target.submit(running, 0.0)
    while not running.first_s:
        target.advance(target.next_event_s)
    target.submit(waiting, 1.0)
    assert set(target.stop(1.0)) == {running, waiting}
    assert 20 < running.generated < 1000
    assert target.next_event_s == math.inf


def test_a_request_that_memory_can_never_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the KV memory holds"):
        engine(replica(ROOMY, blocks=10)).submit(leg(0, 320, 10), 0.0)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_more_gpus_and_smaller_weights_make_steps_shorter(tensor: int) -> None:
    def step(model: EngineModel) -> float:
        line = StepCosts(model, ROOMY).line(8, 1000.0)
        return line.at_zero + line.slope * 1000.0

    sharded = replace(MODEL, shape=EngineShape(tensor=tensor))
    assert step(sharded) == pytest.approx(sharded.decode(8, 1000.0).seconds, rel=1e-6)
    assert sharded.decode(8, 1000.0).communication_s == 0.0 or tensor > 1
    if tensor > 1:
        assert step(sharded) < step(MODEL)


def test_times_between_tokens_are_counted_with_the_stalls_that_prompts_cause() -> None:
    for chunked in (True, False):
        target = engine(replica(replace(ROOMY, chunked=chunked, step_tokens=256)))
        run(target, [leg(0, 32, 400), leg(1, 6_000, 2, at=0.5)])
        longest = max(target.totals.gaps)
        whole = StepCosts(MODEL, ROOMY).prompts([PromptChunk(6_000, 0, True)], 0, 0.0)
        assert (GapBins.middle(longest) > 0.9 * whole) is not chunked
        assert sum(target.totals.gaps.values()) == pytest.approx(400)
