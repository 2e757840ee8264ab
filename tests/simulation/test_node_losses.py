"""Losses that a cluster brings, in virtual time: a node that is cut off and comes back, a drain of the node
with the only decode replica, and upgrades in a row. Every stream is exact, and no pause is longer than
promised.

`load_tests/scenarios/cluster` measures the same with processes, network namespaces and Ray.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import pytest

from kvasir.config.spec.deployment import Deployment, SimSpec, WorkerSpec
from kvasir.core.requests import Sampling
from kvasir_platform.sim.chaos.checks import broken_streams
from kvasir_platform.sim.chaos.load import Gaps
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock
from kvasir_platform.sim.stories import simulate, small_deployment

NOBODY: frozenset[str] = frozenset()
LONGEST_GAP_S = 3.0
STEP_S = 0.02
TOKENS = 300
"""Six seconds of steps."""


def fleet(prefill: int = 2, decode: int = 2) -> Deployment:
    """Workers that keep a session without its router for ten seconds, the default."""
    spec = small_deployment(prefill, decode)
    steps = {"sim": SimSpec(prefill_tokens_per_s=20_000.0, decode_step_s=STEP_S)}
    pools = [pool.model_copy(update={"engine": pool.engine.model_copy(update=steps)}) for pool in spec.pools]
    return spec.model_copy(update={"pools": tuple(pools), "worker": WorkerSpec()})


class Streams:
    """Streams through a cluster's router, with the pauses that their clients saw."""

    def __init__(self) -> None:
        self.all: list[ClientStream] = []
        self.gaps = Gaps(VirtualClock())

    async def begin(self, cluster: Cluster, count: int, tokens: int = TOKENS) -> list[ClientStream]:
        """Send that many, and wait until each has its first token."""
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        first = len(self.all)
        made = [cluster.submit(range(i, 64 + i), sampling) for i in range(first, first + count)]
        self.all += made
        for stream in made:
            await stream.started.wait()
        return made

    async def finish(self) -> None:
        """Wait for all of them."""
        for stream in self.all:
            await stream.finished()

    def check(self, spec: Deployment) -> None:
        """Every token once, and in time."""
        assert list(broken_streams(spec, self.all, NOBODY)) == []
        assert max(self.gaps.longest.values()) <= LONGEST_GAP_S


def played(spec: Deployment, story: Callable[[Cluster, Streams], Awaitable[None]]) -> Streams:
    """Play a story to the end of all its streams; nothing may be left on any worker then."""
    streams = Streams()

    async def whole(cluster: Cluster) -> None:
        await story(cluster, streams)
        await streams.finish()

    simulate(spec, whole, on_stream=streams.gaps)
    streams.check(spec)
    return streams


def decode_workers(streams: Iterable[ClientStream]) -> set[str | None]:
    return {stream.summary.decode_worker for stream in streams if stream.summary}


def test_a_node_that_is_cut_off_while_its_processes_live_costs_its_streams_a_pause() -> None:
    async def story(cluster: Cluster, streams: Streams) -> None:
        running = await streams.begin(cluster, 6)
        # A node has a worker of each role.
        for worker_id in ("prefill-0", "decode-2"):
            cluster.faults.partition(worker_id)
        await streams.begin(cluster, 2, tokens=20)
        await streams.finish()
        assert decode_workers(running) == {"decode-3"}
        for worker_id in ("prefill-0", "decode-2"):
            cluster.faults.heal(worker_id)

    played(fleet(), story)


@pytest.mark.parametrize("listed", [True, False], ids=["still listed", "no longer listed"])
@pytest.mark.parametrize("away_s", [4.0, 12.0], ids=["with its session", "without it"])
def test_a_node_that_comes_back_after_its_replica_was_replaced_adds_no_token(
    away_s: float, listed: bool
) -> None:
    """Its engine has gone on with the streams, and tells of them if its session has been kept."""

    async def story(cluster: Cluster, streams: Streams) -> None:
        await streams.begin(cluster, 6)
        old = cluster.workers["decode-2"].endpoint
        cluster.faults.partition("decode-2")
        if not listed:
            # As Kubernetes does for a node that does not answer for long.
            await cluster.forget("decode-2")
        await cluster.add("decode")
        await cluster.clock.sleep(away_s)
        if not listed:
            await cluster.discovery.put(*cluster.discovery.endpoints, old)
        cluster.faults.heal("decode-2")
        await cluster.ready()
        await streams.begin(cluster, 6, tokens=20)

    streams = played(fleet(), story)
    assert len(decode_workers(streams.all)) == 3


def test_a_drain_of_the_node_with_the_only_decode_replica_fails_no_request() -> None:
    async def story(cluster: Cluster, streams: Streams) -> None:
        running = await streams.begin(cluster, 4)
        await cluster.stop("decode-1", "drained", 1.0)
        await cluster.forget("decode-1")
        during = await streams.begin(cluster, 2, tokens=20)
        await cluster.clock.sleep(1.0)
        await cluster.add("decode")
        await cluster.ready()
        after = await streams.begin(cluster, 2, tokens=20)
        await streams.finish()
        assert decode_workers(running) <= {"prefill-0", "decode-1"}
        assert decode_workers(during) == {"prefill-0"}
        assert len(decode_workers(after) - {"prefill-0"}) == 1

    played(fleet(prefill=1, decode=1), story)


def test_two_upgrades_in_a_row_fail_no_request() -> None:
    async def story(cluster: Cluster, streams: Streams) -> None:
        for _ in range(2):
            for worker_id in list(cluster.workers):
                await streams.begin(cluster, 2, tokens=60)
                await cluster.add(worker_id.partition("-")[0])
                await cluster.ready()
                await cluster.stop(worker_id, "upgrade", 0.5)
                await cluster.forget(worker_id)

    streams = played(fleet(), story)
    assert len(streams.all) == 16
