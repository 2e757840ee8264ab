"""The console's pages of costs: one for all viewers who choose the same, and few that are kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.kit.gateway.api_answers import RecordingWire, exchange_on, received

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.console.cost_views import MOST_KEPT, CostViews
from kvasir_platform.gateway.console.shared_page import SURVEYED_S
from kvasir_platform.gateway.http.exchange import Exchange


class Stage:
    """Pages that say what was asked for; `asked` has each that was rendered."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[dict[str, Any]] = []
        self.views = CostViews("/costs", self._show, lambda: self.now_s)

    def _show(self, exchange: Exchange) -> None:
        assert (exchange.request.method, exchange.request.path) == ("GET", "/costs")
        self.asked.append(json.loads(exchange.request.body))
        exchange.respond(200, exchange.request.body)

    def look(self, query: bytes = b"") -> Any:
        wire = RecordingWire()
        self.views.serve(exchange_on(wire, query=query))
        return json.loads(received(wire.sent).body)


def test_a_viewer_gets_what_is_chosen_and_else_tenants_of_a_week() -> None:
    stage = Stage()
    assert stage.look() == {"by": "tenant", "days": 7}
    assert stage.look(b"by=key&days=90") == {"by": "key", "days": 90}


def test_viewers_who_choose_the_same_share_a_page_until_it_is_old() -> None:
    stage = Stage()
    for _ in range(3):
        stage.look(b"by=model&days=30")
        stage.look(b"days=30&by=slo")
    assert stage.asked == [{"by": "model", "days": 30}, {"by": "slo", "days": 30}]
    stage.now_s = SURVEYED_S
    stage.look(b"by=model&days=30")
    assert stage.asked[2:] == [{"by": "model", "days": 30}]


def test_the_pages_that_were_asked_for_last_are_kept() -> None:
    stage = Stage()
    chosen = [b"by=tenant", b"by=key", b"by=model", b"by=slo", b"by=pool"]
    assert len(chosen) == MOST_KEPT + 1
    for query in (*chosen[:MOST_KEPT], chosen[0], chosen[-1]):
        stage.look(query)
    assert [each["by"] for each in stage.asked] == ["tenant", "key", "model", "slo", "pool"]
    stage.look(chosen[0])
    assert len(stage.asked) == MOST_KEPT + 1
    stage.look(chosen[1])
    assert stage.asked[-1]["by"] == "key"


@pytest.mark.parametrize("query", [b"by=colour", b"by=hour", b"days=2", b"days=all", b"days=", b"since=1"])
def test_a_choice_that_there_is_not_is_refused(query: bytes) -> None:
    stage = Stage()
    with pytest.raises(RequestError) as refused:
        stage.look(query)
    assert (refused.value.status, refused.value.code) == (400, "invalid_value")
    assert stage.asked == []
