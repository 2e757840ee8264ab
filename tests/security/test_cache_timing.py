"""No tenant learns from times or usage what another has sent, by a test that would detect it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from load_tests.scenarios.scorecard import run as scorecard
from load_tests.scenarios.scorecard.common import Trial
from load_tests.scenarios.scorecard.security import kolmogorov, row19


@pytest.mark.parametrize(
    ("one", "other", "distance", "p"),
    [
        ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], 1.0, 2 / 70),
        ([1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0], 1.0, 2 / 252),
        ([1.0, 2.0, 4.0], [3.0, 5.0, 6.0], 2 / 3, 0.6),
        ([1.0, 3.0, 5.0], [2.0, 4.0, 6.0], 1 / 3, 1.0),
        ([1.0, 2.0, 3.0, 4.0, 9.0], [5.0, 6.0, 7.0, 8.0, 10.0], 4 / 5, 20 / 252),
        ([1.0], [2.0, 3.0], 1.0, 2 / 3),
        ([1.0, 1.0, 2.0], [1.0, 1.0, 2.0], 0.0, 1.0),
    ],
)
def test_small_samples_have_the_values_of_the_tables(
    one: list[float], other: list[float], distance: float, p: float
) -> None:
    verdict = kolmogorov.compare(one, other)
    assert verdict.distance == pytest.approx(distance)
    assert verdict.p == pytest.approx(p)
    assert kolmogorov.compare(other, one) == verdict


@pytest.mark.parametrize(("distance", "p"), [(0.086, 0.0494), (0.104, 0.0088), (0.2, 4e-9)])
def test_five_hundred_values_each_have_nearly_the_limit_of_many(distance: float, p: float) -> None:
    # One sample is the other, moved on by so many places.
    one = [float(i) for i in range(500)]
    other = [i + 500 * distance - 0.5 for i in range(500)]
    verdict = kolmogorov.compare(one, other)
    assert verdict.distance == pytest.approx(distance)
    assert verdict.p == pytest.approx(p, rel=0.1)


def test_equal_distributions_are_called_different_as_often_as_the_level_says() -> None:
    rng = Random(5)
    called = sum(
        kolmogorov.compare([rng.random() for _ in range(60)], [rng.random() for _ in range(60)]).p < 0.1
        for _ in range(400)
    )
    # Forty in the mean, less for the steps between possible values of p.
    assert 12 <= called <= 60


@pytest.mark.slow
@pytest.mark.soak
async def test_no_tenant_finds_what_another_has_asked(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    size = row19.Size(prompts=40, embeddings=20, handed=20, batch=10)
    figures = await row19.measure(Trial(tmp_path, 26, quiet=True), size)
    # Whether times differ by chance is the scorecard's own business; what is found in a cache is not.
    figures = [figure for figure in figures if figure.unit != "p"]
    rows = scorecard.report_rows(scorecard.Result(19, tuple(figures)), 1)
    assert all(row.met is not False for row in rows), [row for row in rows if row.met is False]
    assert any(row.met for row in rows)
