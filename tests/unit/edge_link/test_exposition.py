"""Metrics of several processes are merged into one page."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client import Histogram as Standard
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvasir.telemetry.families.updated import HistogramFamily
from kvasir_platform.edge.exposition import lasting, merged, parse, render


def process(requests: int, waits: list[float], running: int) -> bytes:
    registry = CollectorRegistry()
    counter = Counter("requests", 'With a "quote" and a \\ in its text', ["model"], registry=registry)
    counter.labels('a "b" {c} d').inc(requests)
    family = HistogramFamily("wait_seconds", "Wait", ("model",), (0.1, 1.0))
    registry.register(family)
    standard = Standard("other_seconds", "Other", registry=registry, buckets=(0.5,))
    for wait in waits:
        family.labels("m").observe(wait)
        standard.observe(wait)
    Gauge("running", "Running", registry=registry).set(running)
    return generate_latest(registry)


def sums(text: bytes) -> dict[str, float]:
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_one_process_is_shown_as_it_is() -> None:
    text = process(3, [0.05, 0.5, 5.0], 2)
    assert render(merged([parse(text)])) == text


def test_counters_histograms_and_gauges_are_summed_series_by_series() -> None:
    page = render(merged([parse(process(3, [0.05, 5.0], 2)), parse(process(4, [0.5], 1))]))
    both = sums(process(7, [0.05, 0.5, 5.0], 3))
    assert sums(page) == both


def test_each_family_is_announced_once_and_before_its_series() -> None:
    page = render(merged([parse(process(1, [1.0], 0)), parse(process(1, [1.0], 0))])).decode().splitlines()
    types = [line for line in page if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    first = page.index('wait_seconds_bucket{le="0.1",model="m"} 0.0')
    assert page.index("# TYPE wait_seconds histogram") < first


@pytest.mark.parametrize("name", ["a_created", "certificate_expiry_timestamp_seconds"])
def test_of_moments_the_first_one_counts(name: str) -> None:
    def text(at: int) -> bytes:
        return f"# HELP {name} A.\n# TYPE {name} gauge\n{name} {at}.0\n".encode()

    page = render(merged([parse(text(5)), parse(text(3)), parse(text(9))]))
    assert page.endswith(f"\n{name} 3.0\n".encode())


def test_of_a_process_that_has_ended_counters_stay_and_gauges_do_not() -> None:
    left = sums(render(lasting(parse(process(3, [0.05], 2)))))
    assert not any(name.startswith("running") for name in left)
    assert left["requests_total[('model', 'a \"b\" {c} d')]"] == 3.0
    assert left["wait_seconds_count[('model', 'm')]"] == 1.0
