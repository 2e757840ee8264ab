"""Counters and histograms are updated without locks, and scraped as those of prometheus_client are."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from kvasir.telemetry.families.updated import CounterFamily


def test_a_counter_is_scraped_as_one_of_the_client_library() -> None:
    registry, standard = CollectorRegistry(), CollectorRegistry()
    made = CounterFamily("kvasir_requests", "Requests", ("model", "outcome"))
    registry.register(made)
    theirs = Counter("kvasir_requests", "Requests", ("model", "outcome"), registry=standard)
    for model, outcome, amount in (("a", "ok", 1), ("b", "ok", 2), ("a", "ok", 0.5), ("a", 'b"', 3)):
        made.add((model, outcome), amount)
        theirs.labels(model, outcome).inc(amount)
    shown = generate_latest(standard).decode().splitlines()
    # The library also says when each series was created.
    assert generate_latest(registry).decode().splitlines() == [
        each for each in shown if "_created" not in each
    ]


def test_a_counter_without_series_is_announced() -> None:
    registry = CollectorRegistry()
    registry.register(CounterFamily("kvasir_requests", "Requests", ("model",)))
    assert b"# TYPE kvasir_requests_total counter" in generate_latest(registry)


@pytest.mark.parametrize("values", [(), ("a",), ("a", "b", "c")])
def test_a_series_of_other_labels_is_refused(values: tuple[str, ...]) -> None:
    made = CounterFamily("kvasir_requests", "Requests", ("model", "outcome"))
    with pytest.raises(ValueError, match="kvasir_requests has the labels"):
        made.add(values)
    assert not next(iter(made.collect())).samples
