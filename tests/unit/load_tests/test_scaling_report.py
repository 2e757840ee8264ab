"""A part of the scaling report can be measured anew without touching the others."""

from __future__ import annotations

from load_tests.report import Row, Run
from load_tests.scenarios.scaling import merged
from load_tests.scenarios.start_up import rows


def row(name: str, value: float, commit: str = "") -> Row:
    run = Run(commit, "2026-01-02", "a machine", "python -m scaling") if commit else None
    return Row(name, value, "s", "lower", run=run)


def test_rows_that_were_not_measured_keep_place_value_and_run() -> None:
    kept = [row("a", 1, "old"), row("b", 2, "old"), row("c", 3, "old")]
    assert merged(kept, [row("b", 5), row("d", 6)]) == [kept[0], row("b", 5), kept[2], row("d", 6)]


def test_each_variant_of_a_start_is_a_row() -> None:
    variants = ("lazy", "prefetch", "warm", "eager", "compiled, empty", "compiled, kept")
    found = rows({name: [3.0, 1.0, 2.0] for name in variants}, 1_013_000_000)
    assert len({each.name for each in found}) == len(variants)
    assert {(each.value, each.spread) for each in found} == {(2.0, (1.0, 3.0))}
    assert found[0].name == "engine start, 1.0 GB of weights, page cache cold, load.strategy lazy"
