"""Renamed metrics: both names are exposed, with the same values."""

from __future__ import annotations

import pytest
from prometheus_client import Counter, Gauge, generate_latest

from kvasir.telemetry.renamed import FORMER_NAMES, AliasingRegistry


def samples(text: str) -> dict[str, str]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, value in lines if "_created" not in name}


def test_a_renamed_gauge_has_its_former_name_and_labels_too() -> None:
    registry = AliasingRegistry()
    gauge = Gauge("kvasir_pool_replicas_desired", "Replicas", ["pool"], registry=registry)
    gauge.labels("decode").set(3)
    text = generate_latest(registry).decode()
    assert samples(text) == {
        'kvasir_pool_replicas_desired{pool="decode"}': "3.0",
        'kvasir_pool_replicas_wished{pool="decode"}': "3.0",
    }
    assert "# HELP kvasir_pool_replicas_wished Deprecated: use kvasir_pool_replicas_desired." in text


def test_a_renamed_counter_keeps_its_suffix() -> None:
    registry = AliasingRegistry()
    Counter("kvasir_rate_limits_local_decisions", "Decisions", registry=registry).inc(2)
    shown = samples(generate_latest(registry).decode())
    assert shown["kvasir_rate_limits_decided_alone_total"] == "2.0"
    assert shown["kvasir_rate_limits_local_decisions_total"] == "2.0"


def test_a_metric_of_another_name_is_exposed_once() -> None:
    registry = AliasingRegistry()
    Gauge("kvasir_requests_queued", "Requests", registry=registry).set(1)
    assert samples(generate_latest(registry).decode()) == {"kvasir_requests_queued": "1.0"}


@pytest.mark.parametrize("name", FORMER_NAMES.values())
def test_no_former_name_is_a_name_in_use(name: str) -> None:
    assert name not in FORMER_NAMES
