"""A router lists the requests that run as they are, and those that ended, at the cost of the listed ones."""

from __future__ import annotations

import asyncio
from array import array

from kvasir.clock import MonotonicClock
from kvasir.core.requests import Request, RouteArm, Sampling
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.stories import small_deployment

PATIENCE_S = 20.0


def asked(name: str, cluster: Cluster) -> ClientStream:
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    tokens = array("I", range(90))
    arrival_s = cluster.clock.now()
    arm = RouteArm("chat", "kvasir-tiny")
    return ClientStream(
        Request(name, "kvasir-tiny", tokens, sampling, arrival_s=arrival_s, tenant="acme", route_arm=arm)
    )


async def test_running_and_ended_requests_are_listed_in_the_order_of_their_arrival() -> None:
    cluster = Cluster(small_deployment(), MonotonicClock())
    await cluster.start()
    try:
        router = cluster.router
        streams = [asked(f"r{i}", cluster) for i in range(6)]
        for stream in streams:
            router.submit(stream.request, stream)
        assert router.in_flight == 6
        listed = router.running(4)
        assert [view.so_far.request_id for view in listed] == ["r0", "r1", "r2", "r3"]
        first = listed[0]
        assert (first.prompt_tokens, first.output_tokens, first.so_far.tenant) == (90, 0, "acme")
        assert first.phase in ("queued", "prefilling", "decoding")
        assert first.so_far.outcome == ""
        found = router.running_request("r5")
        assert found is not None
        assert found.so_far.request_id == "r5"
        assert router.running_request("unknown") is None
        async with asyncio.timeout(PATIENCE_S):
            for stream in streams:
                await stream.ended.wait()
        assert router.running(4) == []
        (ended,) = router.ended()
        assert {summary.request_id for summary in ended} == {f"r{i}" for i in range(6)}
        assert {(summary.tenant, summary.route_arm) for summary in ended} == {
            ("acme", ("chat", "kvasir-tiny"))
        }
        assert [each.finished_s for each in ended] == sorted(each.finished_s for each in ended)
    finally:
        await cluster.close()
