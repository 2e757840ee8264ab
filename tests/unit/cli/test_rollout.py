"""`kvasir rollout`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir_platform.cli.main import main


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path))
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)


def view(route: str = "chat", **changes: Any) -> dict[str, Any]:
    return {
        "route": route, "model": "v1", "canary": "v2", "phase": "running", "share": 0.05, "step": 0,
        "steps": [0.05, 0.5], "for_s": 61.0, "reason": "", "compared": 40, "min_requests": 200,
        "counts": {"canary_failed": 2, "itl_worse": 30, "itl_better": 10}, "threshold": 4.382,
        "evidence": {"errors": 0.0, "slo": 0.0, "ttft": 0.0, "itl": 3.21}, "shared": True, "stale_s": 0.4,
        **changes,
    }  # fmt: skip


def rollout(gateway: Any, *arguments: str) -> int:
    return main(["rollout", *arguments, "--address", gateway.address])


def test_the_status_shows_steps_and_what_speaks_against_a_canary(gateway: Any, capsys: Any) -> None:
    gateway.answers["/rollouts"] = (200, {"rollouts": [view(), view("other", shared=False)]})
    assert rollout(gateway, "status") == 0
    head, line, *rest = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["ROUTE", "MODEL", "CANARY", "PHASE"]
    assert " ".join(line.split()) == "chat v1 v2 running 5 % 1 of 2 61 s 40 of 200 2 0"
    assert "  time between tokens: worse in 30 of 40 comparisons, evidence 3.2 of 4.4" in rest
    assert any("decides alone" in each for each in rest)
    assert rollout(gateway, "status", "chat", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out) == [view()]


def test_an_order_goes_to_the_route_or_to_the_only_one(gateway: Any, capsys: Any) -> None:
    gateway.answers["/rollouts"] = (200, {"rollouts": [view("org/chat")]})
    gateway.answers["/rollouts/org%2Fchat/abort"] = (200, view("org/chat", phase="rolled_back", share=0.0))
    assert rollout(gateway, "abort") == 0
    assert "org/chat: rolled_back, 0 % of requests go to v2" in capsys.readouterr().out
    assert rollout(gateway, "abort", "org/chat") == 0
    assert gateway.posts == [("/rollouts/org%2Fchat/abort", {})] * 2


def test_what_cannot_be_ordered_is_told(gateway: Any, capsys: Any) -> None:
    gateway.answers["/rollouts"] = (200, {"rollouts": [view(), view("other")]})
    assert rollout(gateway, "start") == 1
    assert "name the route; there are: chat, other" in capsys.readouterr().err
    error = {"error": {"code": "rollout_state", "message": "The rollout is running; undo applies to …"}}
    gateway.answers["/rollouts/chat/undo"] = (409, error)
    assert rollout(gateway, "undo", "chat") == 1
    assert "The rollout is running" in capsys.readouterr().err
    assert rollout(gateway, "status", "third") == 1
    assert "no route 'third' with a canary; there are: chat, other" in capsys.readouterr().err


def test_without_canaries_it_says_how_to_have_one(gateway: Any, capsys: Any) -> None:
    gateway.answers["/rollouts"] = (200, {"rollouts": []})
    assert rollout(gateway, "status") == 0
    assert "no route has a canary" in capsys.readouterr().out


def test_explain_names_the_route_and_the_arm_of_a_request(gateway: Any, capsys: Any) -> None:
    timeline = {"request_id": "r-1", "route": "chat", "arm": "v2"}
    gateway.answers["/decisions/r"] = (200, {"request_id": "r", "decisions": [], "timelines": [timeline]})
    assert main(["explain", "r", "--address", gateway.address]) == 0
    assert "route chat: answered by its arm v2" in capsys.readouterr().out


def test_the_status_of_a_gateway_has_its_routes(gateway: Any, capsys: Any) -> None:
    routes = [
        {"route": "chat", "arms": ["v1"], "fallbacks": ["small"], "rollout": view()},
        {"route": "mixed", "arms": ["v1", "v2"], "fallbacks": [], "rollout": None},
    ]
    gateway.answers["/status"] = (200, {"deployment": "d", "workers": [], "routes": routes})
    assert main(["status", "--address", gateway.address]) == 0
    shown = capsys.readouterr().out
    assert "route chat: v1, else small; the canary v2 is running, with 5 % of requests" in shown
    assert "route mixed: v1, v2\n" in shown
