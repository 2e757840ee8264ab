"""`kvasir drain`, with and without --undo."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvasir.core.errors import RequestError, UpstreamError
from kvasir_platform.cli.commands.drain import DrainArguments, drain
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.main import main

ASKED = (202, {"worker_id": "decode-7f", "draining": True})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path))
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)


def seen(state: str, in_flight: int = 0, running: int = 0, waiting: int = 0, reason: str = "") -> Any:
    """GET /status with the worker as it is then."""
    worker: dict[str, Any] = {"worker_id": "decode-7f", "pool": "decode", "state": state, "reason": reason}
    worker |= {"in_flight": in_flight, "load": {"running": running, "waiting": waiting}}
    return (200, {"workers": [{"worker_id": "other", "state": "ready"}, worker]})


GONE: Any = (200, {"workers": []})


class Watcher:
    """Runs `drain` with time of its own, which only passes in pauses."""

    def __init__(self, gateway: Any) -> None:
        self.gateway = gateway
        self.out = io.StringIO()
        self.waited_s = 0.0
        gateway.answers["/workers/decode-7f/drain"] = ASKED
        gateway.answers["/workers/decode-7f/undrain"] = ASKED

    def __call__(self, *seen: Any, json_mode: bool = False, **desired: Any) -> int:
        *self.gateway.later["/status"], self.gateway.answers["/status"] = seen
        output = CommandOutput(json=json_mode, out=self.out)
        asked = DrainArguments("decode-7f", **desired)
        return drain(asked, Site(self.gateway.address), output, pause=self._pause, now=lambda: self.waited_s)

    def said(self) -> list[str]:
        return self.out.getvalue().splitlines()

    def _pause(self, seconds: float) -> None:
        self.waited_s += seconds


@pytest.fixture
def watcher(gateway: Any) -> Watcher:
    gateway.later["/status"] = []
    return Watcher(gateway)


def test_it_shows_how_many_streams_are_left_and_ends_when_none_is(watcher: Watcher, gateway: Any) -> None:
    steps = [seen("ready", 2, 3, 1), seen("draining", 2, 3, 1), seen("draining", 1, 1), seen("draining")]
    assert watcher(*steps, reason="kernel update") == 0
    assert gateway.posts == [("/workers/decode-7f/drain", {"reason": "kernel update"})]
    assert watcher.said() == [
        "decode-7f: ready, 4 streams left",
        "decode-7f: draining, 4 streams left",
        "decode-7f: draining, 1 stream left",
        "decode-7f: draining, 0 streams left",
        "decode-7f is drained: no streams run on it, and it can be stopped",
    ]


def test_one_quiet_report_is_not_believed(watcher: Watcher) -> None:
    steps = [seen("draining"), seen("draining", 0, 1), seen("draining"), seen("draining")]
    assert watcher(*steps) == 0
    assert watcher.waited_s == 1.5


def test_an_idle_worker_that_has_not_said_that_it_drains_is_waited_for(watcher: Watcher) -> None:
    assert watcher(*[seen("ready")] * 3, seen("draining")) == 0
    assert watcher.waited_s == 2.0


def test_a_worker_that_leaves_while_it_drains_is_done(watcher: Watcher) -> None:
    assert watcher(seen("draining", 1, 1), GONE) == 0
    assert watcher.said()[-1] == "decode-7f has left; the wait ends"


def test_a_worker_that_stops_after_it_drained_is_done_even_if_its_address_is_still_known(
    watcher: Watcher,
) -> None:
    assert watcher(seen("connecting", 1), seen("draining", 1, 1), seen("connecting", 0, 1)) == 0
    assert watcher.said()[-1] == "decode-7f has stopped; the wait ends"


def test_a_drain_that_somebody_took_back_does_not_end_well(watcher: Watcher) -> None:
    with pytest.raises(UpstreamError, match="its drain was undone"):
        watcher(seen("draining", 1, 1), seen("ready", 1, 1))


def test_streams_that_outlast_the_timeout_are_told_with_what_to_do(watcher: Watcher) -> None:
    with pytest.raises(UpstreamError) as caught:
        watcher(seen("draining", 3, 3, reason="kernel update"), timeout_s=60.0)
    assert watcher.waited_s == 60.0
    assert caught.value.code == "drain_timeout"
    assert caught.value.message == (
        "decode-7f is draining (kernel update) with 3 streams after 60 s; the drain continues. "
        "Continue waiting with: kvasir drain decode-7f, or undo it with: kvasir drain decode-7f --undo"
    )


def test_undo_waits_until_the_worker_serves(watcher: Watcher, gateway: Any) -> None:
    assert watcher(seen("draining", 1, 1), seen("ready", 1, 1), undo=True) == 0
    assert gateway.posts == [("/workers/decode-7f/undrain", {})]
    assert watcher.said()[-1] == "decode-7f serves again"


def test_undo_of_a_worker_that_is_being_stopped_says_why_it_does_not_come_back(watcher: Watcher) -> None:
    with pytest.raises(UpstreamError, match=r"is draining \(scale-down\) after 10 s"):
        watcher(seen("draining", 1, 1, reason="scale-down"), undo=True)


def test_programs_get_one_object(watcher: Watcher) -> None:
    assert watcher(seen("draining", 2, 2), seen("draining"), json_mode=True) == 0
    assert [json.loads(line) for line in watcher.said()] == [{"worker_id": "decode-7f", "state": "drained"}]


def test_without_waiting_the_worker_has_only_been_asked(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["/workers/a%2Fb/drain"] = ASKED
    assert main(["drain", "a/b", "--no-wait", "--address", gateway.address]) == 0
    assert capsys.readouterr().out == "a/b asked to drain; watch it with: kvasir get workers\n"
    assert gateway.posts == [("/workers/a%2Fb/drain", {})]


def test_an_unknown_worker_fails_with_those_that_are_known(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"code": "worker_not_found", "message": "There is no worker 'x' here; there are: a, b."}
    gateway.answers["/workers/x/drain"] = (404, {"error": error})
    assert main(["drain", "x", "--address", gateway.address]) == 1
    assert capsys.readouterr().err == "error: There is no worker 'x' here; there are: a, b.\n"


def test_a_gateway_that_wants_a_key_gets_it(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.answers["/workers/w/drain"] = (401, {})
    assert main(["drain", "w", "--address", gateway.address]) == 1
    monkeypatch.setenv("KVASIR_API_KEY", "k")
    gateway.answers["/workers/w/drain"] = ASKED
    assert main(["drain", "w", "--no-wait", "--address", gateway.address]) == 0
    assert gateway.keys == [None, "Bearer k"]


def test_a_refusal_of_the_gateway_is_passed_on(watcher: Watcher, gateway: Any) -> None:
    gateway.answers["/workers/decode-7f/drain"] = (502, {"error": {"message": "decode-7f cannot be reached"}})
    with pytest.raises(UpstreamError, match="cannot be reached"):
        watcher(seen("ready"))
    gateway.answers["/workers/decode-7f/drain"] = (404, {"error": {"code": "worker_not_found"}})
    with pytest.raises(RequestError):
        watcher(seen("ready"))
