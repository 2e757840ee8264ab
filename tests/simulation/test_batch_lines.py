"""What lines of batches do to interactive requests, on the production router in virtual time."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from random import Random

import pytest

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import CapacityError
from kvasir.core.requests import Request, Sampling, SloClass, token_ids
from kvasir_platform.gateway.batches.pace import LinePace
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.stories import simulate
from kvasir_platform.sim.traffic import TrafficShape, poisson_traffic

SLO = SloClass("default", ttft_s=1.0, itl_s=0.1)
BATCH = SloClass("batch", ttft_s=3600.0, itl_s=0.1)
SECONDS = 10.0


def deployment() -> Deployment:
    engine = {
        "kind": "sim",
        "block_size": 16,
        "max_num_seqs": 16,
        "kv_cache_bytes": 64_000 * 2048,
        "sim": {"prefill_tokens_per_s": 20_000.0, "decode_step_s": 0.004},
    }
    slo = [{"name": SLO.name, "ttft_s": SLO.ttft_s, "itl_s": SLO.itl_s}]
    pools = [{"name": "both", "role": "both", "replicas": 4, "engine": engine}]
    return Deployment.model_validate({"disaggregation": "never", "pools": pools, "slo": slo})


class Play:
    """Interactive requests, and lines of a batch beside them with the pace of a batch."""

    def __init__(self, rate: float, lines: int) -> None:
        self.ttfts: list[float] = []
        self.refused = 0
        self.executed = 0
        self._rate = rate
        self._lines = lines

    def run(self) -> Play:
        simulate(deployment(), self._story)
        return self

    async def _story(self, cluster: Cluster) -> None:
        lines = asyncio.create_task(self._batch(cluster))
        clock, shape = cluster.clock, TrafficShape(rate=self._rate, seconds=SECONDS, mean_own_tokens=400)
        began, streams = clock.now(), []
        for number, arrival in enumerate(poisson_traffic(Random(7), shape)):
            await clock.sleep(began + arrival.at_s - clock.now())
            stream = ClientStream(
                self._request(cluster, f"r{number}", arrival.tokens, arrival.output_tokens, 0)
            )
            try:
                cluster.router.submit(stream.request, stream)
            except CapacityError:
                self.refused += 1
                continue
            streams.append(stream)
        lines.cancel()
        for stream in streams:
            await stream.ended.wait()
            assert stream.summary is not None
            assert stream.summary.ttft_s is not None
            self.ttfts.append(stream.summary.ttft_s)

    async def _batch(self, cluster: Cluster) -> None:
        pace, clock, rng = LinePace(lambda: 64), cluster.clock, Random(3)
        running: list[ClientStream] = []
        left: Iterator[int] = iter(range(self._lines))
        number = next(left, None)
        while number is not None:
            for stream in [each for each in running if each.ended.is_set()]:
                running.remove(stream)
                pace.ended()
                self.executed += 1
            if pace.wait_s(clock.now()) == 0.0:
                tokens = token_ids(rng.randrange(100, 4000) for _ in range(rng.randrange(50, 800)))
                stream = ClientStream(self._request(cluster, f"line{number}", tokens, 64, 3000))
                pace.started()
                try:
                    cluster.router.submit(stream.request, stream)
                except CapacityError:
                    pace.refused(clock.now())
                else:
                    running.append(stream)
                    number = next(left, None)
            await clock.sleep(0.005)

    def _request(
        self, cluster: Cluster, name: str, tokens: array[int], output: int, priority: int
    ) -> Request:
        sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
        return Request(
            name,
            cluster.deployment.model.name,
            tokens,
            sampling,
            arrival_s=cluster.clock.now(),
            priority=priority,
            slo=BATCH if priority else SLO,
        )


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


@pytest.mark.slow
@pytest.mark.soak
def test_interactive_requests_wait_no_longer_beside_a_batch() -> None:
    alone, beside = Play(70.0, 0).run(), Play(70.0, 100_000).run()
    assert beside.refused == alone.refused == 0
    assert len(beside.ttfts) == len(alone.ttfts) > 500
    assert beside.executed > 20
    assert p99(beside.ttfts) <= 1.05 * p99(alone.ttfts)


def test_the_lines_of_a_batch_use_what_is_left_of_an_idle_deployment() -> None:
    play = Play(1.0, 60).run()
    assert play.executed >= 45
