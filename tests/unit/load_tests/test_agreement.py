"""The comparison of `kvasir bench` with aiperf: what agrees, and what each is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from load_tests.scenarios.agreement.__main__ import LOADS, MOCK, MOCK_RATE, rows
from load_tests.scenarios.agreement.tools import Measured, trace

from kvasir_platform.workload.files import read_workload


def measured(ttft: float, rate: float, wire: float = 50.0) -> Measured:
    return Measured({"TTFT p50": ttft, "requests/s": rate}, 100.0, {"TTFT p50": wire})


def test_medians_are_compared_in_both_directions() -> None:
    pairs = [(measured(a, 1.0), measured(100.0, 1.0)) for a in (80.0, 104.0, 300.0)]
    first, second = rows(MOCK, LOADS[MOCK], pairs)
    assert (first.name, round(first.value, 6), first.met) == ("mock: TTFT p50, difference", 4.0, True)
    assert first.spread is not None
    assert [round(each) for each in first.spread] == [-20, 200]
    assert second.value == 0.0
    slower = [(measured(94.0, 1.0), measured(100.0, 1.0))]
    assert next(iter(rows(MOCK, LOADS[MOCK], slower))).met is False


def test_what_the_server_did_otherwise_is_no_difference() -> None:
    ttft, rate = rows(MOCK, LOADS[MOCK], [(measured(150.0, 1.0, wire=100.0), measured(75.0, 1.0, wire=50.0))])
    assert (ttft.value, rate.value) == (0.0, 0.0)
    assert ttft.note.startswith("kvasir bench 150 ms, 100 on the wire, aiperf")


def test_both_read_the_same_arrivals_from_a_trace(tmp_path: Path) -> None:
    load = LOADS[MOCK_RATE]
    path = trace(load, 3, tmp_path / "arrivals.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    workload = read_workload(path, Random(1))
    assert [round(each.arrival_s * 1e3) for each in workload.requests] == [
        line["timestamp"] for line in lines
    ]
    assert {(each.prompt_tokens, each.output_tokens) for each in workload.requests} == {(256, 24)}
    assert len(lines) == load.requests
    assert load.rate is not None
    assert 0.8 < load.requests / (lines[-1]["timestamp"] / 1e3) / load.rate < 1.25
    assert trace(load, 4, tmp_path / "other.jsonl").read_text() != path.read_text()
