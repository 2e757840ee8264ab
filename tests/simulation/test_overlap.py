"""Prompts that are pulled while they are computed, through the production router, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvasir.config.spec.deployment import Deployment
from kvasir.ports.router import RequestSummary
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.stories import simulate, small_deployment

CHUNK = 256
PROMPT = 2048
CHUNK_S = CHUNK / 20_000.0 + 0.004
BYTES_PER_S = 2e8
"""A slow line: the whole prompt's KV takes two chunks' time and more."""


def deployment(**transfer: Any) -> Deployment:
    spec = small_deployment().model_dump()
    for pool in spec["pools"]:
        pool["engine"]["max_num_batched_tokens"] = CHUNK
        pool["engine"]["sim"]["transfer_bytes_per_s"] = BYTES_PER_S
    return Deployment.model_validate(spec | {"transfer": transfer})


def only_summary(**transfer: Any) -> RequestSummary:
    async def story(cluster: Cluster) -> None:
        assert (await cluster.submit(range(PROMPT)).finished()).outcome == "ok"

    (summary,) = simulate(deployment(**transfer), story).summaries
    return summary


def ttft(summary: RequestSummary) -> float:
    assert summary.ttft_s is not None
    return summary.ttft_s


def test_all_but_the_last_part_of_the_transfer_is_hidden_behind_the_prefill() -> None:
    overlapped, after = only_summary(overlap="always"), only_summary(overlap="never")
    assert overlapped.usage == after.usage
    assert overlapped.prefill_done_s == after.prefill_done_s
    moving = after.usage.transferred_bytes / BYTES_PER_S
    saved = ttft(after) - ttft(overlapped)
    assert 0.8 * moving < saved < moving
    assert overlapped.transfer_s > after.transfer_s


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
@pytest.mark.parametrize("victim", ["prefill_worker", "decode_worker"])
@pytest.mark.parametrize("how", ["kill", "vanish", "fail"])
def test_a_worker_that_is_lost_in_the_middle_of_it_costs_no_token(
    victim: str, how: str, on_failure: str
) -> None:
    async def story(cluster: Cluster) -> None:
        quiet = await cluster.submit(range(PROMPT)).finished()
        stream = cluster.submit(range(1, PROMPT + 1), salt="another")
        await cluster.clock.sleep(3.5 * CHUNK_S)
        router = cluster.router
        record = router.explain(stream.request.request_id)
        assert record is not None
        worker_id = getattr(record, victim)
        assert len([view for view in router.workers() if view.in_flight]) == 2
        endings: dict[str, Callable[[], Any]] = {
            "kill": lambda: cluster.kill(worker_id),
            "vanish": lambda: cluster.vanish(worker_id),
            "fail": lambda: cluster.workers[worker_id].engine.crash("lost"),
        }
        ended = endings[how]()
        if how == "kill":
            await ended
        summary = await stream.finished()
        assert (quiet.outcome, summary.outcome) == ("ok", "ok")
        assert summary.usage.output_tokens == len(stream.tokens[0]) == 8
        if victim == "decode_worker":
            assert summary.migrations == 1
        if how != "fail":
            await cluster.forget(worker_id)

    simulate(deployment(on_failure=on_failure), story)
