"""Targets of the KV bench: what is the default reaches them, neighbouring pieces and short transfers too."""

from __future__ import annotations

import pytest
from load_tests.scenarios.kv import Entry, aims
from load_tests.scenarios.kv_parts.contenders import GB
from load_tests.scenarios.kv_parts.memory import KIB, LARGE_LAYERS, MIB, SMALL_LAYERS, Case


class Nobody:
    """A contender that is never run."""

    name = "nobody"

    def prepare(self, case: Case) -> bool:
        return False

    def run(self) -> float:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def cpu_s(self) -> float:
        raise NotImplementedError


def entry(*, ratio: float | None = None, small_gbs: float | None = None, default: bool = False) -> Entry:
    return Entry(Nobody(), "floor", ratio, small_gbs, default)


LARGE = Case(32 * MIB, MIB, LARGE_LAYERS)
SOON = Case(2 * MIB, MIB, LARGE_LAYERS)
PIECES = Case(32 * MIB, 16 * KIB, SMALL_LAYERS)
SCATTERED = Case(32 * MIB, 16 * KIB, SMALL_LAYERS, scattered=True)


@pytest.mark.parametrize(
    ("case", "floor", "target", "ratio"),
    [
        (LARGE, 10.0, None, 0.9),
        (PIECES, 10.0, 6.0, 0.9),
        # Six GB/s are more than nine tenths of a slow floor.
        (PIECES, 6.0, 6.0, 1.0),
        (SCATTERED, 10.0, None, None),
    ],
)
def test_a_default_reaches_its_share_of_the_floor_and_what_was_promised_for_pieces(
    case: Case, floor: float, target: float | None, ratio: float | None
) -> None:
    assert aims(entry(default=True, small_gbs=6.0), case, floor) == (target, ratio)


def test_a_default_is_at_most_a_third_of_a_millisecond_later_with_little_to_move() -> None:
    size = SOON.total / GB
    target, ratio = aims(entry(default=True), SOON, size / 0.0004)
    assert target == pytest.approx(size / 0.0007)
    assert ratio is None


def test_others_have_the_targets_that_they_state() -> None:
    assert aims(entry(ratio=0.95), LARGE, 10.0) == (None, 0.95)
    assert aims(entry(small_gbs=6.0), PIECES, 10.0) == (6.0, None)
