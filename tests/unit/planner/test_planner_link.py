"""A router's link to the planner, and its behaviour without a response."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from kvasir.core.demand import DemandReport, PlannerReply, Traffic, WorkerStats
from kvasir.core.errors import UpstreamError
from kvasir.core.requests import Role
from kvasir_platform.planner.link import PERIOD_S, SILENT_S, PlannerLink


class Router:
    def __init__(self) -> None:
        self.told: list[tuple[dict[str, Role], Mapping[str, float] | None]] = []

    def demand(self) -> Mapping[str, Traffic]:
        return {"tiny": Traffic(arrived=1)}

    def worker_figures(self) -> list[WorkerStats]:
        return []

    def planned(self, roles: Mapping[str, Role], ready_in_s: Mapping[str, float] | None) -> None:
        self.told.append((dict(roles), ready_in_s))


class Planner:
    """Answers until it is `away`, under the name of its `life`."""

    def __init__(self) -> None:
        self.heard: list[DemandReport] = []
        self.away, self.life = False, "one"

    async def tell(self, report: DemandReport) -> PlannerReply:
        if self.away:
            raise UpstreamError("the planner does not respond: away", code="not_ready")
        self.heard.append(report)
        accepted = report.epoch == self.life
        return PlannerReply(self.life, accepted, {"w": Role.DECODE}, {"tiny": 3.0}, {})


class Stage:
    """Time that passes only where the link sleeps, for so many sleeps."""

    def __init__(self) -> None:
        self.at, self.left, self.slept = 0.0, 0, [0.0]
        self.router, self.planner = Router(), Planner()
        self.link = PlannerLink(self.router, self.planner, self, "router-1")

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds
        self.slept.append(seconds)
        self.left -= 1
        if self.left <= 0:
            raise asyncio.CancelledError

    def turns(self, count: int) -> None:
        self.left = count
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(self.link.run())


def test_reports_count_up_and_take_the_planners_name_at_once() -> None:
    stage = Stage()
    stage.turns(3)
    assert [(each.epoch, each.sequence) for each in stage.planner.heard] == [("", 1), ("one", 2), ("one", 3)]
    assert stage.slept[1] < stage.slept[2] == PERIOD_S


def test_a_planner_that_begins_anew_is_told_again_by_its_new_name() -> None:
    stage = Stage()
    stage.turns(2)
    stage.planner.life = "two"
    stage.turns(2)
    assert [each.epoch for each in stage.planner.heard[-2:]] == ["one", "two"]


def test_roles_stand_while_the_planner_is_silent_but_nobody_is_promised_to_wake() -> None:
    stage = Stage()
    stage.turns(2)
    stage.planner.away = True
    stage.turns(3)
    assert stage.router.told[-1][1] == {"tiny": 3.0}
    stage.turns(int(SILENT_S / PERIOD_S) + 1)
    assert stage.router.told[-1][0] == {"w": Role.DECODE}
    assert stage.router.told[-1][1] is None
    assert stage.link.inactive_s() > SILENT_S
    stage.planner.away = False
    stage.turns(1)
    assert stage.router.told[-1][1] == {"tiny": 3.0}
    assert stage.link.inactive_s() == pytest.approx(0.0)
