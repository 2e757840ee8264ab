"""Clusters under random faults keep every invariant, and a seed determines the whole history."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.kit.cores import over_cores

from kvasir.core.errors import UpstreamError
from kvasir.core.requests import Delta, FinishReason
from kvasir_platform.sim.chaos import run
from kvasir_platform.sim.chaos.__main__ import main
from kvasir_platform.sim.chaos.rows import row_23
from kvasir_platform.sim.chaos.run import play
from kvasir_platform.sim.chaos.schedule import ClusterShape, Fault, FaultKind, Schedule, draw
from kvasir_platform.sim.chaos.workload import draw_asks
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_router.sessions.outbox import Outbox

FAST = range(30)
# Seeds that have found something once, by what they found.
NAMED = {
    "a failing worker costs more retries than a few requests pay for": 273,
}
APART = ClusterShape(prefill=2, decode=2, both=0, disaggregation="always", routers=1)


def one_fault(kind: FaultKind, victim: str = "decode-2", lasts_s: float = 2.0, **more: object) -> Schedule:
    fault = Fault(2.0, kind, victim, lasts_s)
    return replace(
        Schedule(5, APART, requests=12, seconds=6.0, faults=(fault,)),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("seed", FAST)
def test_whatever_happens_to_workers_every_stream_is_whole_and_nothing_is_left(seed: int) -> None:
    assert play(draw(seed)).broken == ()


@pytest.mark.parametrize("seed", NAMED.values(), ids=NAMED.keys())
def test_what_was_found_once_stays_found(seed: int) -> None:
    assert play(draw(seed)).broken == ()


@pytest.mark.parametrize("kind", FaultKind)
def test_each_kind_of_fault_is_borne(kind: FaultKind) -> None:
    if kind is FaultKind.KILL_ROUTER:
        schedule = one_fault(kind, "router", shape=replace(APART, routers=2))
    elif kind is FaultKind.JOIN:
        schedule = one_fault(kind, "decode")
    elif kind in (FaultKind.SLOW, FaultKind.BAD_LINE):
        amount = 3.0 if kind is FaultKind.SLOW else 0.2
        schedule = one_fault(kind, faults=(Fault(2.0, kind, "decode-2", 2.0, amount=amount),))
    else:
        schedule = one_fault(kind)
    assert play(schedule).broken == ()


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_gives_the_same_history_twice(seed: int) -> None:
    assert play(draw(seed), keep=True) == play(draw(seed), keep=True)


def test_a_history_does_not_depend_on_the_order_of_hashed_strings() -> None:
    command = [sys.executable, "-m", "kvasir_platform.sim.chaos", "--seed", "1", "--count", "3"]
    told = [
        subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        ).stdout
        for salt in ("1", "2")
    ]
    assert told[0] == told[1]


def test_other_seeds_give_other_histories() -> None:
    assert len({play(draw(seed)).digest for seed in range(4)}) == 4


def test_a_schedule_leaves_every_pool_a_worker_that_serves() -> None:
    kinds = set()
    for seed in range(300):
        schedule = draw(seed)
        kinds |= {fault.kind for fault in schedule.faults}
        for ids in schedule.shape.pools.values():
            deaths = (FaultKind.KILL, FaultKind.VANISH)
            down = [fault for fault in schedule.faults if fault.victim in ids and fault.kind in deaths]
            for fault in down:
                together = {o.victim for o in down if o.at_s <= fault.at_s <= o.at_s + o.lasts_s}
                assert together < set(ids)
    assert kinds == set(FaultKind)


def test_most_requests_come_shortly_before_a_fault() -> None:
    schedule = replace(draw(7), requests=400)
    near = sum(
        any(fault.at_s - 2.0 <= ask.at_s <= fault.at_s for fault in schedule.faults)
        for ask in draw_asks(schedule)
    )
    assert near > 200


# -- the checks themselves: each of them finds what it is there for ----------------------------------


def test_a_token_that_is_lost_on_its_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    on_delta = ClientStream.on_delta

    def lossy(self: ClientStream, delta: Delta) -> None:
        if delta.offset != 3:
            on_delta(self, delta)

    monkeypatch.setattr(ClientStream, "on_delta", lossy)
    assert any("token 4 came at 3" in broken for broken in play(draw(0)).broken)


def test_a_wrong_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    on_delta = ClientStream.on_delta

    def wrong(self: ClientStream, delta: Delta) -> None:
        on_delta(self, replace(delta, token_ids=(7,) * len(delta.token_ids)) if delta.offset == 3 else delta)

    monkeypatch.setattr(ClientStream, "on_delta", wrong)
    assert any("token 3 is wrong" in broken for broken in play(draw(0)).broken)


def test_an_error_without_a_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    on_finish = ClientStream.on_finish

    def fails(self: ClientStream, summary: object) -> None:
        self.error = UpstreamError("for no reason", code="worker_failed")
        on_finish(self, summary)  # type: ignore[arg-type]

    monkeypatch.setattr(ClientStream, "on_finish", fails)
    assert any("worker_failed: for no reason" in broken for broken in play(draw(0)).broken)


def test_a_stream_that_ends_too_soon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    on_delta = ClientStream.on_delta

    def short(self: ClientStream, delta: Delta) -> None:
        if delta.finish is not FinishReason.LENGTH:
            on_delta(self, delta)

    monkeypatch.setattr(ClientStream, "on_delta", short)
    assert any(" tokens of " in broken for broken in play(draw(0)).broken)


def test_an_invariant_that_breaks_on_the_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsound(self: Cluster) -> None:
        if self.clock.now() > 5.0:
            raise AssertionError("a lease too many")

    monkeypatch.setattr(Cluster, "check", unsound)
    assert any("at 5." in broken and "a lease too many" in broken for broken in play(draw(0)).broken)


def test_a_pause_that_is_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_PAUSE_S", 1.0)
    outcome = play(one_fault(FaultKind.VANISH))
    assert outcome.longest_gap_s > 1.0
    assert any(f"paused for {outcome.longest_gap_s:.1f} s" in broken for broken in outcome.broken)


def test_leases_that_are_not_released_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "release", lambda self, lease_ids: None)
    assert any("not at rest after 5 s" in broken for broken in play(draw(1)).broken)


def test_the_command_tells_the_story_and_names_a_seed_that_broke_a_promise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--seed", "4", "--verbose"]) == 0
    told = capsys.readouterr().out
    assert str(draw(4).faults[0]) in told
    assert "ends: ok" in told
    monkeypatch.setattr(ClientStream, "on_delta", lambda self, delta: None)
    assert main(["--seed", "4"]) == 1
    assert "seed 4 broke a promise" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_seeds_replay_exactly_and_break_no_promise(soak: bool) -> None:
    seeds = range(1_000 if soak else 30)
    measured = over_cores(row_23, seeds)
    assert [(part.unequal, part.broken) for part in measured] == [((), ())] * len(measured)
    assert sum(part.migrations for part in measured) > 0.4 * len(seeds)
