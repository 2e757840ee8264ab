"""Streams go on while the metrics of a large fleet are rendered."""

from __future__ import annotations

import asyncio
import math

from prometheus_client import CollectorRegistry

from kvasir.core.requests import EngineLoad
from kvasir.ports.router import WorkerView
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.edge.edge_metrics import EdgeMetrics
from kvasir_platform.gateway.operator.status_page import joined_in_turns

TURN_BYTES = 40_000
"""At most this much is rendered while streams wait: a few hundred lines."""


def fleet(workers: int) -> Metrics:
    made = Metrics(CollectorRegistry(), ["m"])
    load = EngineLoad(running=1)
    made.workers([WorkerView(f"w-{i}", "a", "decode", "ready", load=load) for i in range(workers)])
    return made


class Turns:
    """Counts the turns of the event loop that others have."""

    def __init__(self) -> None:
        self.count = 0
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._task.cancel()


async def test_others_have_a_turn_after_each_few_metrics() -> None:
    metrics, turns = fleet(200), Turns()
    page = await joined_in_turns(metrics.parts())
    turns.stop()
    assert page == metrics.render()
    assert turns.count >= math.floor(len(page) / TURN_BYTES) > 2


async def test_others_have_turns_while_the_metrics_of_edges_are_merged() -> None:
    metrics, turns = fleet(200), Turns()
    shown = asyncio.get_running_loop().create_future()
    EdgeMetrics(metrics.parts).collect(shown.set_result)
    page = await shown
    turns.stop()
    assert page == metrics.render()
    assert turns.count >= 2 * math.floor(len(page) / TURN_BYTES) > 4
