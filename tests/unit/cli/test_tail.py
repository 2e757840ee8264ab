"""`kvasir tail`: which requests are shown, how, and what happens when a router does not answer."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from kvasir.core.errors import UpstreamError
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.live.tail import LOST_S, TailArguments, TailRun
from kvasir_platform.cli.live.tail_lines import TailFilter, tail_line

NOON = datetime(2030, 1, 1, 12, 0, 10, tzinfo=UTC)


def row(request_id: str = "r-1", arrival_s: float = 1.0, **outcome: Any) -> dict[str, Any]:
    ended = {
        "code": "ok", "status": 200, "slo_met": True, "ttft_s": 0.05, "itl_s": 0.01, "e2e_s": 0.5,
        "output_tokens": 46, "cached_tokens": 64,
    }  # fmt: skip
    known = {"arrival_s": arrival_s, "prompt_tokens": 130, "model": "llama", "slo": "chat", "tenant": "acme"}
    return known | {"request_id": request_id, "outcome": ended | outcome}


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (TailFilter(), ["fast", "slow", "missed", "failed", "gone"]),
        (TailFilter(tenant="acme"), ["fast", "slow", "missed", "failed", "gone"]),
        (TailFilter(tenant="other"), []),
        (TailFilter(model="other"), []),
        (TailFilter(slow_s=0.0), ["missed"]),
        (TailFilter(slow_s=1.0), ["slow"]),
        (TailFilter(failed=True), ["failed"]),
        (TailFilter(slow_s=1.0, failed=True), ["slow", "failed"]),
        (TailFilter(tenant="other", failed=True), []),
    ],
    ids=str,
)
def test_a_filter_shows_what_was_asked_for(asked: TailFilter, shown: list[str]) -> None:
    rows = [
        row("fast"),
        row("slow", e2e_s=3.0),
        row("missed", slo_met=False),
        row("failed", code="worker_lost", slo_met=False),
        row("gone", code="client_closed", slo_met=None),
    ]
    assert [each["request_id"] for each in rows if asked.shows(each)] == shown


def test_a_line_has_the_outcome_the_times_and_the_id() -> None:
    assert tail_line(row(slo_met=False), NOON).split() == (
        [
            "12:00:10.000",
            "ok!",
            "acme",
            "llama",
            "500.0",
            "ms",
            "50.0",
            "ms",
            "10.0",
            "ms",
            "130",
            "64",
            "46",
            "r-1",
        ]
    )
    refused = tail_line(row(code="queue_full", slo_met=False, ttft_s=None, itl_s=None), NOON).split()
    assert refused[1] == "queue_full"
    assert refused[6:8] == ["-", "-"]


class Script(threading.Event):
    """A stop that never waits: each wait is a second and the next step; after the last it is set."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        super().__init__()
        self.steps = list(steps)
        self.now = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now += 1.0
        if not self.steps:
            return True
        self.steps.pop(0)()
        return False


class Tailed:
    """A router, and a tail of it."""

    def __init__(self, wanted: TailArguments | None = None, *, json_output: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.asked: list[Mapping[str, Any]] = []
        self.opened, self.dropped, self.failing = "r/1", 0, False
        self.out, self.err = io.StringIO(), io.StringIO()
        self.wanted = wanted or TailArguments()
        self.output = CommandOutput(json=json_output, out=self.out, err=self.err)

    def read(self, site: Site, reader: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        if self.failing and not body.get("done"):
            raise UpstreamError("the gateway does not answer")
        left = self.rows[body["after"] :][:2]
        last = body["after"] + len(left)
        return {
            "opened": self.opened, "elapsed_s": 10.0, "records": left, "last": last, "dropped": self.dropped,
            "running": 0, "more": last < len(self.rows), "block_tokens": 16,
        }  # fmt: skip

    def run(self, *steps: Callable[[], None]) -> list[str]:
        stop = Script(*steps)
        sites = [Site("router:8000")]
        run = TailRun(
            self.wanted,
            sites,
            self.output,
            stop=stop,
            read=self.read,
            now=lambda: stop.now,
            wall=lambda: NOON,
        )
        run.run()
        return self.out.getvalue().splitlines()[0 if self.output.json else 1 :]


def test_requests_are_printed_as_they_end_with_their_time() -> None:
    tailed = Tailed()
    lines = tailed.run(
        lambda: tailed.rows.extend([row("a"), row("b", e2e_s=2.0), row("c")]),
        lambda: tailed.rows.append(row("d")),
    )
    assert [line.split()[-1] for line in lines] == ["a", "b", "c", "d"]
    assert [line.split()[0][5:] for line in lines[:2]] == [":01.500", ":03.000"]
    assert {each.get("ids") for each in tailed.asked[:-1]} == {True}
    assert not any(each.get("decisions") or each.get("prefixes") for each in tailed.asked)
    assert tailed.asked[-1]["done"] is True


def test_it_ends_after_as_many_lines_as_were_asked_for() -> None:
    tailed = Tailed(TailArguments(requests=2), json_output=True)
    lines = tailed.run(lambda: tailed.rows.extend(row(str(i)) for i in range(5)), lambda: None)
    assert [json.loads(line)["request_id"] for line in lines] == ["0", "1"]
    assert json.loads(lines[0])["ended"] == "2030-01-01T12:00:01.500+00:00"


def test_what_is_missing_is_reported_beside_the_lines() -> None:
    tailed = Tailed()

    def drop() -> None:
        tailed.dropped = 7

    def restart() -> None:
        tailed.opened, tailed.dropped = "r/2", 0

    assert tailed.run(drop, restart) == []
    assert "7 requests were dropped" in tailed.err.getvalue()
    assert "has restarted; some requests are missing" in tailed.err.getvalue()


def test_a_router_that_does_not_answer_is_asked_again_for_a_while() -> None:
    tailed = Tailed()

    def fail(failing: bool) -> Callable[[], None]:
        return lambda: setattr(tailed, "failing", failing)

    tailed.run(fail(True), lambda: None, fail(False))
    assert tailed.err.getvalue().splitlines() == [
        "the gateway does not answer; trying again",
        "the router at router:8000 answers again",
    ]
    with pytest.raises(UpstreamError):
        tailed.run(fail(True), *[lambda: None] * (int(LOST_S) + 5))
