"""Held-out loads are the same for the same seed, and errors are means over loads of relative differences."""

from __future__ import annotations

import random

import pytest
from load_tests.scenarios.truth.__main__ import Compared, _rows
from load_tests.scenarios.truth.loads import LoadFigures, mixed_requests, predicted
from tests.kit.sim.virtual_batching import VirtualOutcome


def test_a_load_has_mixed_lengths_arrives_at_its_rate_and_is_drawn_again_by_its_seed() -> None:
    made = mixed_requests(400, random.Random(3), rate=20.0)
    assert made == mixed_requests(400, random.Random(3), rate=20.0)
    assert made[-1].at_s == pytest.approx(20.0, rel=0.15)
    assert all(32 <= each.prompt_tokens <= 1024 and 16 <= each.output_tokens <= 64 for each in made)
    assert len({each.prompt_tokens for each in made}) > 100
    assert {each.at_s for each in mixed_requests(5, random.Random(3))} == {0.0}


def test_figures_are_medians_over_requests_and_tokens_over_the_whole_time() -> None:
    found = predicted(
        [
            VirtualOutcome(0.0, 0.1, 1.1, 11),
            VirtualOutcome(1.0, 1.3, 2.3, 6),
            VirtualOutcome(2.0, 2.2, 4.0, 3),
        ]
    )
    assert found.ttft_s == pytest.approx(0.2)
    assert found.itl_s == pytest.approx(0.2)
    assert found.tokens_per_s == pytest.approx(20 / 4.0)


def test_a_row_has_the_mean_error_over_loads_and_what_was_predicted_for_each() -> None:
    real = LoadFigures(0.1, 0.01, 100.0)
    found = [
        Compared("a", LoadFigures(0.11, 0.01, 80.0), real),
        Compared("b", LoadFigures(0.07, 0.01, 100.0), real),
    ]
    ttft, itl, throughput = _rows("m", "apart", found)
    assert (ttft.name, ttft.met) == ("m, apart: TTFT", False)
    assert ttft.value == pytest.approx(20.0)
    assert ttft.spread is not None
    assert list(ttft.spread) == pytest.approx([10.0, 30.0])
    assert (itl.value, itl.met) == (0.0, True)
    assert throughput.value == pytest.approx(10.0)
    assert "a: 0.11 for 0.1" in ttft.note
