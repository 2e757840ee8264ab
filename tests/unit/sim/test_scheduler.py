"""The simulated scheduler in situations that random histories rarely reach."""

from __future__ import annotations

from kvasir.core.requests import EngineRequest, KvHandoff, Leg, Sampling, token_ids
from kvasir_workers.engines.sim.batch import PlannedStep
from kvasir_workers.engines.sim.model import SimModel
from kvasir_workers.engines.sim.scheduler import Scheduler
from kvasir_workers.engines.sim.state import SimLimits


def _scheduler(*, blocks: int, max_seqs: int) -> Scheduler:
    limits = SimLimits(
        block_size=2,
        blocks=blocks,
        bytes_per_block=10,
        max_model_len=10,
        max_seqs=max_seqs,
        step_tokens=4,
        chunked_prefill=True,
        prefix_caching=True,
        lease_s=100.0,
        recompute_on_failure=True,
        max_live=8,
    )
    return Scheduler(limits, SimModel(), worker_id="w", epoch=1)


def _decode(request_id: str, tokens: list[int], n: int = 1) -> EngineRequest:
    return EngineRequest(
        request_id,
        token_ids(tokens),
        Sampling(n=n, max_tokens=1),
        leg=Leg.DECODE,
        handoff=KvHandoff("elsewhere", 1, 1.0, 1, b""),
    )


def _step(scheduler: Scheduler) -> PlannedStep:
    step = scheduler.schedule(0.0)
    scheduler.complete(0.0)
    scheduler.check_integrity()
    return step


def _ended(scheduler: Scheduler) -> list[str]:
    return [delta.request_id for delta in scheduler.take_deltas() if delta.last]


def test_when_nobody_runs_the_last_in_order_gives_its_blocks_to_the_first() -> None:
    scheduler = _scheduler(blocks=5, max_seqs=1)
    scheduler.submit(_decode("two-choices", [1, 2, 3, 4], n=2), 0.0)
    scheduler.submit(_decode("behind", [5, 6]), 0.0)
    for order in _step(scheduler).pulls:
        scheduler.pulled(order, 0.1)
    step = _step(scheduler)
    ((leader, _),) = step.work
    for order in step.pulls:
        scheduler.pulled(order, 0.1)
    # The second choice shares block 0 and needs one more; all that is free is leased away.
    assert leader.live.sequences[1].blocks == [0]
    scheduler.leases.grant("w/1/1", 1, [1, 3, 4], 0.0)
    ((running, _),) = _step(scheduler).work
    assert running is leader.live.sequences[1]
    assert scheduler.load().preemptions == 1
    _step(scheduler)
    assert _ended(scheduler) == ["two-choices", "behind"]
