"""The comparison of `kvasir bench` with aiperf: what agrees, and what each is asked for."""

from __future__ import annotations

from load_tests.scenarios.agreement.__main__ import LOADS, MOCK, MOCK_RATE, rows
from load_tests.scenarios.agreement.tools import Measured


def measured(ttft: float, rate: float) -> Measured:
    return Measured({"TTFT p50": ttft, "requests/s": rate}, 100.0)


def test_medians_are_compared_in_both_directions() -> None:
    pairs = [(measured(a, 1.0), measured(100.0, 1.0)) for a in (80.0, 104.0, 300.0)]
    first, second = rows(MOCK, LOADS[MOCK], pairs)
    assert (first.name, round(first.value, 6), first.met) == ("mock: TTFT p50, difference", 4.0, True)
    assert first.spread is not None
    assert [round(each) for each in first.spread] == [-20, 200]
    assert second.value == 0.0
    slower = [(measured(94.0, 1.0), measured(100.0, 1.0))]
    assert next(iter(rows(MOCK, LOADS[MOCK], slower))).met is False


def test_rates_of_an_open_loop_are_not_compared() -> None:
    pairs = [(measured(1.0, 5.0), measured(1.0, 9.0))]
    assert [row.name for row in rows(MOCK_RATE, LOADS[MOCK_RATE], pairs)] == [
        "mock at a rate: TTFT p50, difference"
    ]
