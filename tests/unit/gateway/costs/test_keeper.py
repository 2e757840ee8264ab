"""The keeper writes everything once, whatever happens to the store."""

from __future__ import annotations

import pytest
from tests.kit.clocks import StillClock

from kvasir.config.spec.deployment import Deployment
from kvasir.core.demand import WorkerStats
from kvasir.core.errors import UpstreamError
from kvasir.core.requests import Role, SloClass, Usage
from kvasir.ports.router import RequestSummary, WorkerView
from kvasir.ports.stores.costs import HOUR_S, CostBatch
from kvasir_platform.gateway.costs import ledger as ledgers
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.costs.memory_store import MemoryCosts

EPOCH = 1_900_000_800 // HOUR_S * HOUR_S
SLO = SloClass("default", 1.0, 0.1)


class Source:
    """One decode worker of the default deployment."""

    def workers(self) -> list[WorkerView]:
        return [WorkerView("d", "a", "decode", "ready")]

    def worker_figures(self) -> list[WorkerStats]:
        return [WorkerStats("d", "decode", Role.DECODE, True, 0.01, 1e-4, 0.005, 0.001, 0, 10_000, 0, 0)]


class Flaky(MemoryCosts):
    """Fails the next `failures` batches: half of them after they were added, as if the reply were lost."""

    failures = 0

    async def add(self, batch: CostBatch) -> None:
        if self.failures:
            self.failures -= 1
            if self.failures % 2:
                await super().add(batch)
            raise UpstreamError("no answer", code="costs_unavailable")
        await super().add(batch)


def ended(now: float, number: int = 0, tenant: str = "shop", lasted: float = 2.0) -> RequestSummary:
    return RequestSummary(
        f"r{number}",
        "m",
        "ok",
        now - lasted,
        now,
        routed_s=now - lasted,
        first_token_s=now - lasted / 2,
        decode_worker="d",
        usage=Usage(prompt_tokens=100, output_tokens=50),
        slo=SLO,
        tenant=tenant,
        key=f"key-{number}",
        started_s=now - lasted,
    )


def keeper(store: MemoryCosts, clock: StillClock) -> CostKeeper:
    made = CostKeeper(Deployment(), "router-a", store, clock, lambda: EPOCH + clock.now())
    made.ledger.source = Source()
    return made


async def test_nothing_is_lost_or_counted_twice_while_the_store_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, clock = Flaky(), StillClock(100.0)
    costs = keeper(store, clock)
    costs.ledger.sample()
    store.failures = 3
    for number in range(5):
        clock.at += 10.0
        costs.ledger.ended(ended(clock.now(), number))
        costs.ledger.sample()
        await costs.write()
    found = await store.read(EPOCH, EPOCH + HOUR_S)
    assert sum(sums.requests for sums in found.work.values()) == 5
    assert [(each.first_s, each.last_s, each.busy_s) for each in found.workers] == [(100.0, 150.0, 10.0)]
    assert costs.stored
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


async def test_a_request_that_ran_in_two_hours_is_charged_in_both() -> None:
    store, clock = MemoryCosts(), StillClock(HOUR_S - 30.0)
    costs = keeper(store, clock)
    costs.ledger.sample()
    clock.at += 90.0
    costs.ledger.ended(ended(clock.now(), lasted=80.0))
    costs.ledger.sample()
    await costs.write()
    found = await store.read(EPOCH, EPOCH + 2 * HOUR_S)
    claims = {group.hour - EPOCH: sums.claims for group, sums in found.work.items()}
    assert claims[HOUR_S] == pytest.approx(3 * claims[0])
    assert {each.hour - EPOCH: (each.busy_s, each.last_s - each.first_s) for each in found.workers} == {
        0: (20.0, 30.0), HOUR_S: (60.0, 60.0),
    }  # fmt: skip
    assert sum(sums.requests for sums in found.work.values()) == 1


async def test_groups_of_an_hour_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MOST_GROUPS", 10)
    store, clock = MemoryCosts(), StillClock(100.0)
    costs = keeper(store, clock)
    for number in range(100):
        costs.ledger.ended(ended(clock.now(), number))
    await costs.write()
    found = await store.read(EPOCH, EPOCH + HOUR_S)
    assert len(found.work) == 11
    assert sum(sums.requests for sums in found.work.values()) == 100
    assert max(sums.requests for group, sums in found.work.items() if group.key == ledgers.OTHER) == 90


async def test_what_is_older_than_the_retention_is_forgotten() -> None:
    store, clock = MemoryCosts(), StillClock(100.0)
    costs = keeper(store, clock)
    costs.ledger.sample()
    clock.at += 10.0
    costs.ledger.sample()
    await costs.write()
    clock.at += costs.retention_s + 2.0 * HOUR_S
    await costs.write()
    assert list((await store.read(0, EPOCH * 2)).workers) == []
