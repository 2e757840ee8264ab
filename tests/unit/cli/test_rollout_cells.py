"""`kvasir rollout cells`: gateways of several cells, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.unit.cli.conftest import CannedGateway, canned_gateway

from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.main import main
from kvasir_platform.cli.rollout.cells import CellWatch, roll_over_cells
from kvasir_router.regions.revisions import RevisionRules

RULES = RevisionRules(("eu", "us"), soak_s=100.0)


class Cells:
    """Two cells whose gateways take orders. Each pause lets `ends` come true: the phase in which the canary
    that runs in a cell ends."""

    def __init__(self, eu: CannedGateway, us: CannedGateway) -> None:
        self.gateways = {"eu": eu, "us": us}
        self.phases = dict.fromkeys(self.gateways, "idle")
        self.since = dict.fromkeys(self.gateways, 0.0)
        self.ends = dict.fromkeys(self.gateways, "promoted")
        self.now = 0.0
        for name, gateway in self.gateways.items():
            self._show(name)
            for action, phase in (("start", "running"), ("undo", "rolled_back"), ("abort", "rolled_back")):
                path = f"/rollouts/chat/{action}"
                gateway.answers[path] = lambda _body, name=name, phase=phase: self._turn(name, phase)

    @property
    def sites(self) -> dict[str, Site]:
        return {name: Site(gateway.address) for name, gateway in self.gateways.items()}

    @property
    def orders(self) -> list[str]:
        return [f"{name} {path}" for name, each in self.gateways.items() for path, _ in each.posts]

    def pause(self, seconds: float) -> None:
        self.now += seconds
        for name, phase in self.phases.items():
            if phase == "running":
                self._turn(name, self.ends[name])
            self._show(name)

    def _turn(self, name: str, phase: str) -> tuple[int, dict[str, Any]]:
        self.phases[name], self.since[name] = phase, self.now
        self._show(name)
        return 200, {"route": "chat", "phase": phase}

    def _show(self, name: str) -> None:
        reason = "it fails more often" if self.phases[name] == "rolled_back" else ""
        view = {"route": "chat", "phase": self.phases[name], "for_s": self.now - self.since[name]}
        self.gateways[name].answers["/rollouts"] = (200, {"rollouts": [{**view, "reason": reason}]})


@pytest.fixture
def cells() -> Iterator[Cells]:
    with ExitStack() as stack:
        yield Cells(stack.enter_context(canned_gateway()), stack.enter_context(canned_gateway()))


def follow(cells: Cells, *, once: bool = False) -> int:
    watch = CellWatch(10.0, once, cells.pause)
    return roll_over_cells("chat", cells.sites, RULES, watch, CommandOutput(json=False))


def test_cells_take_the_canary_one_after_the_other(cells: Cells, capsys: Any) -> None:
    assert follow(cells) == 0
    assert cells.orders == ["eu /rollouts/chat/start", "us /rollouts/chat/start"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "waiting: eu idle, us idle; start in eu"
    assert lines[1] == "waiting: eu promoted, us idle; serves for less than 100 s in eu"
    assert lines[-1] == "done: eu promoted, us promoted"


def test_a_rollback_in_the_second_cell_takes_it_back_in_the_first(cells: Cells, capsys: Any) -> None:
    cells.ends["us"] = "rolled_back"
    assert follow(cells) == 1
    assert cells.phases == {"eu": "rolled_back", "us": "rolled_back"}
    assert "going_back: eu promoted, us rolled_back; undo in eu" in capsys.readouterr().out


def test_a_cell_that_does_not_answer_is_waited_for(cells: Cells, capsys: Any) -> None:
    cells.gateways["us"].answers["/rollouts"] = (503, {})
    assert follow(cells, once=True) == 0
    assert cells.orders == []
    assert "us not reachable" in capsys.readouterr().out


def test_a_cell_that_does_not_answer_is_taken_back_before_the_command_ends(cells: Cells, capsys: Any) -> None:
    cells.phases |= {"eu": "promoted", "us": "rolled_back"}
    cells.pause(0.0)
    cells.gateways["eu"].answers["/rollouts"] = (503, {})
    assert follow(cells) == 1
    assert cells.phases == {"eu": "rolled_back", "us": "rolled_back"}
    assert "going_back: eu not reachable, us rolled_back" in capsys.readouterr().out


def test_the_command_takes_cells_by_name_and_tells_what_it_did(cells: Cells, capsys: Any) -> None:
    named = [f"--cell={name}={gateway.address}" for name, gateway in cells.gateways.items()]
    assert main(["rollout", "cells", "chat", *named, "--once", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["orders"] == [{"cell": "eu", "action": "start"}]
    assert found["cells"]["us"] == {"phase": "idle", "for_s": 0.0}
    assert cells.phases == {"eu": "running", "us": "idle"}


def test_cells_without_the_route_or_without_names_are_refused(cells: Cells, capsys: Any) -> None:
    address = cells.gateways["eu"].address
    assert main(["rollout", "cells", "other", f"--cell=eu={address}"]) == 1
    assert "eu has no route 'other' with a canary; there are: chat" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["rollout", "cells", "chat", f"--cell={address}"])
    assert main(["rollout", "cells", "chat", f"--cell=eu={address}", f"--cell=eu={address}"]) == 1
    assert "eu is listed twice" in capsys.readouterr().err
