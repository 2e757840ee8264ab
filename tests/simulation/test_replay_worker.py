"""The simulated worker of trace replays: its cache, its reports, and its times."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from random import Random

import pytest

from kvasir.core.kv import Medium
from kvasir.core.requests import Leg
from kvasir.native import PrefixTree
from kvasir_platform.sim.replay.cache import BlockCache, Hit
from kvasir_platform.sim.replay.replica import SimReplica, a800_node
from kvasir_platform.sim.replay.worker import Happened, Job, ReplayWorker
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS
from kvasir_platform.workload.requests import WorkloadRequest, block_name

NODE = a800_node(cpu_bytes=0.0)


def chain(first: int, blocks: int) -> array[int]:
    return array("Q", [block_name(first + i) for i in range(blocks)])


def parents_of(*chains: array[int]) -> dict[int, int]:
    return {name: 0 if i == 0 else names[i - 1] for names in chains for i, name in enumerate(names)}


def request(names: array[int], output: int = 10, extra: int = 1) -> WorkloadRequest:
    return WorkloadRequest(0.0, len(names) * TRACE_BLOCK_TOKENS + extra, output, names)


def worker(replica: SimReplica, *chains: array[int]) -> ReplayWorker:
    cache = BlockCache(replica.device_blocks, replica.cpu_blocks, parents_of(*chains))
    return ReplayWorker("w", replica, cache)


def run(worker: ReplayWorker) -> list[Job]:
    """Until nothing is left to do; the jobs in the order in which they ended."""
    ended: list[Job] = []
    while worker.next_event_s < math.inf:
        ended.extend(worker.advance(worker.next_event_s).ended)
    return ended


class Follower:
    """Holds what a cache says that it holds."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._tree = PrefixTree(1 << 16, 0)
        self._group = self._tree.add_group()

    def agrees(self) -> bool:
        self._tree.apply([self._group], self._cache.take_log())
        told = [self._tree.held(self._group, medium) for medium in (Medium.DEVICE, Medium.CPU)]
        return told == [len(self._cache.device_names), len(self._cache.cpu_names)]


def use(cache: BlockCache, names: array[int]) -> Hit:
    """A request that comes and goes."""
    hit = cache.lookup(names, len(names))
    assert cache.admit(names, hit, len(names))
    new = cache.fill(names[hit.blocks :])
    cache.release(names, len(names) - hit.blocks - new)
    return hit


def test_a_prompts_last_blocks_are_evicted_first() -> None:
    old, young = chain(0, 4), chain(100, 3)
    cache = BlockCache(5, 0, parents_of(old, young))
    use(cache, old)
    use(cache, young)
    assert cache.device_names == {*old[:2], *young}


def test_what_a_running_request_holds_stays_and_a_request_without_room_is_refused() -> None:
    running, other = chain(0, 4), chain(100, 3)
    cache = BlockCache(6, 0, parents_of(running, other))
    assert cache.admit(running, Hit(0, 0), 4)
    assert not cache.admit(other, Hit(0, 0), 3)
    cache.release(running[:0], 4)
    assert cache.admit(other, Hit(0, 0), 3)


def test_evicted_blocks_come_back_from_cpu_memory_until_they_are_evicted_there() -> None:
    first, second, third = chain(0, 4), chain(100, 4), chain(200, 4)
    cache = BlockCache(4, 4, parents_of(first, second, third))
    use(cache, first)
    use(cache, second)
    assert cache.cpu_names == set(first)
    assert use(cache, first) == Hit(4, 4)
    use(cache, third)
    assert use(cache, second) == Hit(0, 0)


def test_who_follows_the_log_knows_what_is_held() -> None:
    chains = [chain(1000 * i, 3 + i % 4) for i in range(6)]
    chains += [array("Q", [*each[:2], *chain(9000 + 10 * i, 3)]) for i, each in enumerate(chains)]
    cache = BlockCache(9, 7, parents_of(*chains))
    follower = Follower(cache)
    for i in range(60):
        use(cache, chains[i * i % len(chains)])
        assert follower.agrees()


def test_a_lone_request_takes_the_unloaded_times() -> None:
    names = chain(0, 20)
    alone = worker(NODE, names)
    job = Job(0, request(names, output=101), Leg.FULL, 0.0)
    alone.submit(job, 0.0)
    assert run(alone) == [job]
    prompt = job.request.prompt_tokens
    assert job.computed_s == pytest.approx(NODE.unloaded_ttft_s(prompt), rel=1e-9)
    itl = (job.finished_s - job.computed_s) / 100
    assert itl == pytest.approx(NODE.unloaded_itl_s(prompt + 51), rel=1e-3)


def step_by_step(replica: SimReplica, jobs: list[WorkloadRequest]) -> list[tuple[float, float]]:
    """(first token, last token) of requests that come at once, one engine step after the other."""
    now, waiting = 0.0, list(range(len(jobs)))
    left = [float(job.prompt_tokens) for job in jobs]
    got = [0] * len(jobs)
    first, last = [0.0] * len(jobs), [0.0] * len(jobs)
    while any(got[i] < jobs[i].output_tokens for i in range(len(jobs))):
        streams = [i for i in range(len(jobs)) if 0 < got[i] < jobs[i].output_tokens]
        now += replica.step_fixed_s + replica.step_stream_s * len(streams)
        now += replica.step_kv_token_s * sum(jobs[i].prompt_tokens + got[i] for i in streams)
        budget, done = float(replica.step_tokens - len(streams)), []
        while waiting and budget > 0:
            i = waiting[0]
            part = min(budget, left[i])
            position = jobs[i].prompt_tokens - left[i] + part / 2
            now += part * (replica.prefill_token_s + replica.prefill_context_s * position)
            budget, left[i] = budget - part, left[i] - part
            if left[i] == 0:
                done.append(waiting.pop(0))
        for i in [*streams, *done]:
            got[i] += 1
            first[i] = first[i] or now
            last[i] = now
    return list(zip(first, last, strict=True))


def test_the_closed_form_agrees_with_running_every_step() -> None:
    chains = [chain(1000 * i, 3 + 7 * i % 30) for i in range(12)]
    requests = [request(names, output=20 + 17 * i % 90) for i, names in enumerate(chains)]
    closed = worker(NODE, *chains)
    jobs = [Job(i, each, Leg.FULL, 0.0) for i, each in enumerate(requests)]
    for job in jobs:
        closed.submit(job, 0.0)
    run(closed)
    chunk_s = NODE.step_tokens * NODE.prefill_token_s * 1.5
    for job, (first, last) in zip(jobs, step_by_step(NODE, requests), strict=True):
        assert job.computed_s == pytest.approx(first, abs=chunk_s)
        assert job.finished_s == pytest.approx(last, abs=2 * chunk_s)


def test_looking_at_a_worker_between_events_changes_nothing() -> None:
    chains = [chain(1000 * i, 20 + 7 * i) for i in range(6)]
    ends = []
    for often in (False, True):
        looked_at = worker(NODE, *chains)
        rng = Random(1)
        for i, names in enumerate(chains):
            looked_at.submit(Job(i, request(names, output=2000), Leg.FULL, 0.0), 0.0)
        now = 0.0
        ended: list[Job] = []
        while looked_at.next_event_s < math.inf:
            due = looked_at.next_event_s
            if often:
                for at in sorted(now + rng.random() * (due - now) for _ in range(5)):
                    assert looked_at.advance(at) == Happened()
                due = looked_at.next_event_s
            now = due
            ended.extend(looked_at.advance(now).ended)
        ends.append([(job.number, job.computed_s, job.finished_s) for job in ended])
    for seldom, looked in zip(*ends, strict=True):
        assert looked == pytest.approx(seldom, rel=1e-6)


def test_prompts_are_computed_in_the_order_of_arrival_and_find_what_the_one_before_left() -> None:
    names = chain(0, 10)
    busy = worker(NODE, names)
    first, second = (Job(i, request(names), Leg.FULL, 0.0) for i in range(2))
    busy.submit(first, 0.0)
    busy.submit(second, 0.0)
    run(busy)
    assert first.hit == Hit(0, 0)
    assert second.hit == Hit(10, 0)
    assert second.started_s == first.computed_s


def test_a_request_waits_until_a_stream_has_left_it_room() -> None:
    one, other = chain(0, 10), chain(100, 10)
    small = worker(replace(NODE, device_blocks=15), one, other)
    first, second = Job(0, request(one), Leg.FULL, 0.0), Job(1, request(other), Leg.FULL, 0.0)
    small.submit(first, 0.0)
    small.submit(second, 0.0)
    run(small)
    assert second.started_s == first.finished_s


def test_blocks_from_cpu_memory_take_their_time_and_save_computing() -> None:
    one, other = chain(0, 10), chain(100, 10)
    tiered = worker(replace(NODE, device_blocks=11, cpu_blocks=20), one, other)
    for number, names in enumerate((one, other)):
        tiered.submit(Job(number, request(names), Leg.FULL, 0.0), 0.0)
    ended = run(tiered)
    again = Job(2, request(one), Leg.FULL, ended[-1].finished_s)
    tiered.submit(again, ended[-1].finished_s)
    run(tiered)
    loading = 10 * TRACE_BLOCK_TOKENS * NODE.kv_token_bytes * NODE.cpu_byte_s
    took = again.computed_s - again.started_s
    assert again.hit == Hit(10, 10)
    (tier,) = tiered.load.tiers
    assert (tier.medium, tier.loads, tier.loaded_blocks) == (Medium.CPU, 1, 10)
    assert tier.load_s == again.load_s == pytest.approx(tier.loaded_bytes * NODE.cpu_byte_s)
    assert loading < took < loading + NODE.unloaded_ttft_s(TRACE_BLOCK_TOKENS)


def test_a_pulled_prompt_waits_for_its_bytes_and_then_for_a_step() -> None:
    names = chain(0, 10)
    decoder = worker(NODE, names)
    job = Job(0, request(names), Leg.DECODE, 0.0)
    decoder.submit(job, 0.0)
    run(decoder)
    prompt = job.request.prompt_tokens
    pulled = NODE.transfer_fixed_s + prompt * NODE.kv_token_bytes * NODE.transfer_byte_s
    assert job.computed_s == pytest.approx(pulled)
    assert job.first_s == pytest.approx(pulled + NODE.step_fixed_s)
    assert decoder.prefilled_tokens == 0
