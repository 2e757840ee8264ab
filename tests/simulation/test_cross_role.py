"""Workers of any role continue streams when none of the right role is left, in virtual time."""

from __future__ import annotations

import logging
from functools import partial
from itertools import combinations, permutations

import pytest

from kvasir.core.errors import CapacityError
from kvasir.core.requests import Sampling
from kvasir_platform.sim.chaos.checks import broken_streams
from kvasir_platform.sim.chaos.load import Gaps
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock
from kvasir_platform.sim.stories import simulate
from kvasir_platform.sim.stories import small_deployment as deployment

PREFILL, DECODE, OTHER_DECODE = WORKERS = ("prefill-0", "decode-1", "decode-2")
LOSSES = [
    *(((worker_id,), 0.0) for worker_id in WORKERS),
    *((pair, apart_s) for pair in combinations(WORKERS, 2) for apart_s in (0.0, 0.7)),
]
"""The workers that are lost, and how many seconds one after the other."""
three_workers = partial(deployment, prefill=1, decode=2)
KINDS = ["kill", "freeze", "partition"]
SECOND_LOSSES = [0.3, 0.7, 1.2, 1.45, 1.9, 2.0, 2.01, 2.05, 2.3]
"""Seconds from the loss of one worker to that of the worker that streams have moved to, or will."""
LONG = Sampling(max_tokens=500, temperature=0.0, ignore_eos=True)
LONGEST_GAP_S = 3.0
NOBODY: frozenset[str] = frozenset()


async def lose(cluster: Cluster, worker_id: str, kind: str) -> None:
    if kind == "kill":
        await cluster.kill(worker_id)
    elif kind == "freeze":
        cluster.faults.freeze(worker_id)
    else:
        cluster.faults.partition(worker_id)


async def give_back(cluster: Cluster, worker_id: str, kind: str) -> None:
    if kind == "kill":
        await cluster.forget(worker_id)
    elif kind == "freeze":
        cluster.faults.thaw(worker_id)
    else:
        cluster.faults.heal(worker_id)


@pytest.mark.parametrize("kind", ["kill", "freeze", "partition"])
@pytest.mark.parametrize(("lost", "apart_s"), LOSSES)
def test_streams_go_on_within_three_seconds_while_any_worker_lives(
    lost: tuple[str, ...], kind: str, apart_s: float
) -> None:
    gaps, spec, streams = Gaps(VirtualClock()), three_workers(), list[ClientStream]()

    async def story(cluster: Cluster) -> None:
        routers = [next(iter(cluster.routers)), cluster.add_router()]
        await cluster.ready()
        for i in range(2):
            streams.append(cluster.submit(range(i, 64 + i), LONG, router_id=routers[i % 2]))
        for stream in streams:
            await stream.started.wait()
        for worker_id in lost:
            await lose(cluster, worker_id, kind)
            await cluster.clock.sleep(apart_s)
        arrived = [cluster.submit(range(i, 64 + i), LONG, router_id=routers[i % 2]) for i in range(2, 4)]
        streams.extend(arrived)
        for stream in streams:
            await stream.finished()
        if DECODE in lost and OTHER_DECODE in lost:
            assert {stream.summary.decode_worker for stream in streams if stream.summary} == {PREFILL}
        for worker_id in lost:
            await give_back(cluster, worker_id, kind)

    simulate(spec, story, on_stream=gaps)
    assert list(broken_streams(spec, streams, NOBODY)) == []
    assert max(gaps.longest.values()) <= LONGEST_GAP_S


def longest_gap(lost: tuple[str, str], kinds: tuple[str, str], apart_s: float) -> float:
    """The longest gap of two streams that lose one worker after the other."""
    gaps, spec, streams = Gaps(VirtualClock()), three_workers(), list[ClientStream]()

    async def story(cluster: Cluster) -> None:
        await cluster.ready()
        streams.extend(cluster.submit(range(i, 64 + i), LONG) for i in range(2))
        for stream in streams:
            await stream.started.wait()
        await lose(cluster, lost[0], kinds[0])
        await cluster.clock.sleep(apart_s)
        await lose(cluster, lost[1], kinds[1])
        for stream in streams:
            await stream.finished()
        for worker_id, kind in zip(lost, kinds, strict=True):
            await give_back(cluster, worker_id, kind)

    simulate(spec, story, on_stream=gaps)
    assert list(broken_streams(spec, streams, NOBODY)) == []
    return max(gaps.longest.values())


@pytest.mark.parametrize("kinds", [("freeze", "freeze"), ("partition", "kill")], ids="-".join)
@pytest.mark.parametrize("lost", list(permutations(WORKERS, 2)), ids="-".join)
def test_a_stream_that_moves_to_a_worker_that_is_lost_too_goes_on_within_three_seconds(
    lost: tuple[str, str], kinds: tuple[str, str]
) -> None:
    assert longest_gap(lost, kinds, 2.01) <= LONGEST_GAP_S


@pytest.mark.soak
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("lost", list(permutations(WORKERS, 2)), ids="-".join)
def test_two_losses_in_a_row_at_any_time_apart_stay_within_three_seconds(
    lost: tuple[str, str], first: str, second: str
) -> None:
    longest = {apart_s: longest_gap(lost, (first, second), apart_s) for apart_s in SECOND_LOSSES}
    assert {apart_s: gap for apart_s, gap in longest.items() if gap > LONGEST_GAP_S} == {}


def test_without_a_prefill_worker_prompts_are_computed_where_they_decode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(cluster: Cluster) -> None:
        assert (await cluster.submit(range(64)).finished()).prefill_worker == PREFILL
        await cluster.kill(PREFILL)
        await cluster.clock.sleep(1.0)
        assert cluster.router.not_ready_reason() is None
        summary = await cluster.submit(range(64)).finished()
        assert (summary.prefill_worker, summary.reason) == (None, "cross_role")
        record = cluster.router.explain(summary.request_id)
        assert record is not None
        assert (record.reason, record.mode) == ("cross_role", "aggregated")
        await cluster.forget(PREFILL)
        await cluster.add("prefill")
        await cluster.ready()
        assert (await cluster.submit(range(64)).finished()).prefill_worker == "prefill-5"

    with caplog.at_level(logging.WARNING, "kvasir_router"):
        simulate(three_workers(), story)
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["no", "requests"]


def test_a_fleet_that_was_never_complete_waits_for_the_role_that_starts() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(64))
        await cluster.clock.sleep(3.0)
        assert cluster.router.not_ready_reason() == "no worker that decodes"
        assert not stream.started.is_set()
        await cluster.add("decode")
        assert (await stream.finished()).prefill_worker is not None

    spec = deployment(prefill=1, decode=1)
    pools = tuple(pool.model_copy(update={"replicas": int(pool.name == "prefill")}) for pool in spec.pools)
    simulate(spec.model_copy(update={"pools": pools}), story)


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_model_that_slept_waits_for_every_role_as_at_its_first_start(role: str, other: str) -> None:
    asleep = {"kvasir-tiny": 5.0}

    async def story(cluster: Cluster) -> None:
        await cluster.submit(range(64)).finished()
        for worker_id in (f"{other}-{int(other == 'decode')}", f"{role}-{int(role == 'decode')}"):
            await cluster.kill(worker_id)
            await cluster.clock.sleep(3.0)
            await cluster.forget(worker_id)
        cluster.router.planned({}, asleep)
        stream = cluster.submit(range(64))
        assert cluster.router.demand()["kvasir-tiny"].parked == 1, "what the planner wakes the model for"
        cluster.router.planned({}, asleep)
        await cluster.add(role)
        await cluster.clock.sleep(3.0)
        assert not stream.started.is_set()
        await cluster.add(other)
        assert (await stream.finished()).prefill_worker is not None

    simulate(deployment(prefill=1, decode=1), story)


def test_streams_that_outlive_every_worker_of_a_model_that_may_sleep_take_the_first_new_one() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(64), LONG)
        await stream.started.wait()
        for worker_id in ("prefill-0", "decode-1"):
            await cluster.kill(worker_id)
            await cluster.forget(worker_id)
        await cluster.clock.sleep(3.0)
        cluster.router.planned({}, {"kvasir-tiny": 5.0})
        await cluster.add("prefill")
        assert (await stream.finished()).decode_worker == "prefill-3"

    simulate(deployment(prefill=1, decode=1), story)


def test_requests_wait_for_their_role_where_the_spec_says_so() -> None:
    async def story(cluster: Cluster) -> None:
        for worker_id in (DECODE, OTHER_DECODE):
            await cluster.kill(worker_id)
        await cluster.clock.sleep(1.0)
        stream = cluster.submit(range(64))
        with pytest.raises(CapacityError) as caught:
            await stream.finished()
        assert "no worker that decodes" in caught.value.message

    simulate(three_workers(cross_role_after_s=None, queue_timeout_s=5.0), story)


def test_a_prompt_that_is_being_computed_is_answered_where_it_is_when_nobody_else_decodes() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(4000), Sampling(max_tokens=40, temperature=0.0, ignore_eos=True))
        await cluster.clock.sleep(0.02)
        for worker_id in (DECODE, OTHER_DECODE):
            await cluster.kill(worker_id)
        summary = await stream.finished()
        assert (summary.decode_worker, summary.reason) == (PREFILL, "cross_role")
        assert len(stream.tokens[0]) == 40

    simulate(three_workers(), story)
