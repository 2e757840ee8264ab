"""The rows of how soon engines start."""

from __future__ import annotations

from load_tests.scenarios.start_up import rows


def test_each_variant_of_a_start_is_a_row() -> None:
    variants = ("lazy", "prefetch", "warm", "eager", "compiled, empty", "compiled, kept")
    found = rows({name: [3.0, 1.0, 2.0] for name in variants}, 1_013_000_000)
    assert len({each.name for each in found}) == len(variants)
    assert {(each.value, each.spread) for each in found} == {(2.0, (1.0, 3.0))}
    assert found[0].name == "engine start, 1.0 GB of weights, page cache cold, load.strategy lazy"
