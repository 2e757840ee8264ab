"""`kvasir trace`: phases as bars, claims on workers, then the decision."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import CannedGateway
from tests.unit.cli.test_get_and_explain import RECORD

from kvasir_platform.cli.live.waterfall import waterfall
from kvasir_platform.cli.main import main

PHASES = [
    {"phase": "queue", "start_s": 0.0, "end_s": 0.1, "worker": None},
    {"phase": "prefill", "start_s": 0.1, "end_s": 0.5, "worker": "p-1"},
    {"phase": "transfer", "start_s": 0.5, "end_s": 0.501, "worker": "d-0"},
    {"phase": "stream", "start_s": 0.501, "end_s": 2.0, "worker": "d-0"},
]
TIMELINE: dict[str, Any] = {
    "request_id": RECORD.request_id, "model": "llama", "tenant": "acme", "slo": "chat", "outcome": "ok",
    "running": None, "total_s": 2.0, "ttft_s": 0.501, "itl_s": 0.05, "slo_met": False, "prompt_tokens": 1501,
    "output_tokens": 31, "cached_tokens": 1024, "transferred_bytes": 0, "retries": 0, "migrations": 1,
    "phases": PHASES, "claims": [
        {"worker_id": "p-1", "pool": "prefill", "prefill_s": 0.4, "decode_s": 0.0, "kv_s": 0.0125,
         "transfer_s": 0.002, "wasted_s": 0.0},
        {"worker_id": "d-0", "pool": "decode", "prefill_s": 0.0, "decode_s": 0.3, "kv_s": 0.0625,
         "transfer_s": 0.001, "wasted_s": 0.05},
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")


def test_bars_stand_where_the_time_went() -> None:
    text = waterfall(TIMELINE, 80)
    assert text[0] == "abc-12345678: ok, llama, tenant acme, SLO chat missed"
    assert text[1] == (
        "2,000.0 ms in all, TTFT 501.0 ms, mean ITL 50.0 ms; 1,501 tokens in (1,024 cached), 31 out, "
        "1 migrations"
    )
    bars = {line.split()[0]: line for line in text[4:]}
    assert all(len(line) <= 80 for line in bars.values())
    room = max(line.rindex("#") + 1 for line in bars.values()) - min(
        line.index("#") for line in bars.values()
    )
    assert bars["prefill"].count("#") == pytest.approx(room * 0.2, abs=1.1)
    assert bars["stream"].count("#") == pytest.approx(room * 0.75, abs=1.1)
    assert bars["transfer"].count("#") == 1
    assert bars["stream"].index("#") >= bars["prefill"].rindex("#")
    assert "router" in bars["queue"]
    assert "p-1" in bars["prefill"]


def test_a_request_that_runs_or_has_just_arrived_is_shown_as_far_as_it_is() -> None:
    running = TIMELINE | {"outcome": None, "running": "decoding", "slo_met": None, "itl_s": None}
    assert waterfall(running)[0].startswith("abc-12345678: running (decoding), llama")
    assert waterfall(running | {"total_s": 0.0, "phases": []})[-1] == "it has just arrived"


def test_the_timeline_is_printed_with_the_decision(
    gateway: CannedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    page = {"request_id": "abc", "decisions": [asdict(RECORD)], "timelines": [TIMELINE]}
    gateway.answers["/decisions/abc"] = (200, page)
    assert main(["trace", "abc", "--address", gateway.address]) == 0
    text = capsys.readouterr().out
    assert text.index("PHASE") < text.index("Prefilled on p-1") < text.index("SLO chat: ")
    assert main(["trace", "abc", "--address", gateway.address, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["timelines"] == [TIMELINE]


def test_claims_on_workers_are_printed_between_timeline_and_decision(
    gateway: CannedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    page = {"request_id": "abc", "decisions": [asdict(RECORD)], "timelines": [TIMELINE]}
    gateway.answers["/decisions/abc"] = (200, page)
    assert main(["trace", "abc", "--address", gateway.address]) == 0
    text = capsys.readouterr().out
    assert text.index("PHASE") < text.index("Claims on its workers") < text.index("Prefilled on p-1")
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("WORKER"))
    assert lines[at].split() == ["WORKER", "POOL", "PREFILL", "DECODE", "KV", "TRANSFER", "WASTED"]
    shown = [[each for each in line.split() if each != "ms"] for line in lines[at + 1 : at + 3]]
    assert shown == [
        ["p-1", "prefill", "400.0", "0.0", "12.5", "2.0", "0.0"],
        ["d-0", "decode", "0.0", "300.0", "62.5", "1.0", "50.0"],
    ]


@pytest.mark.parametrize("claims", [{"claims": None}, {"claims": []}, {}])
def test_without_claims_nothing_is_said_of_them(
    gateway: CannedGateway, capsys: pytest.CaptureFixture[str], claims: dict[str, Any]
) -> None:
    timeline = {name: each for name, each in TIMELINE.items() if name != "claims"} | claims
    page = {"request_id": "abc", "decisions": [asdict(RECORD)], "timelines": [timeline]}
    gateway.answers["/decisions/abc"] = (200, page)
    assert main(["trace", "abc", "--address", gateway.address]) == 0
    assert "Claims" not in capsys.readouterr().out


def test_a_request_that_waits_has_no_decision_and_one_that_is_unknown_is_an_error(
    gateway: CannedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = TIMELINE | {"outcome": None, "running": "queued", "phases": PHASES[:1]}
    gateway.answers["/decisions/abc"] = (200, {"request_id": "abc", "decisions": [], "timelines": [waiting]})
    assert main(["trace", "abc", "--address", gateway.address]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "it waits, and was not placed yet"
    error = {"error": {"code": "decision_not_found", "message": "No decision is kept for 'x'."}}
    gateway.answers["/decisions/x"] = (404, error)
    assert main(["trace", "x", "--address", gateway.address]) == 1
    assert "No decision is kept for 'x'" in capsys.readouterr().err
