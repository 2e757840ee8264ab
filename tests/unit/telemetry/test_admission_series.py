"""Admission metrics on the metrics page."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvasir.ports.router import AdmissionView, BrownoutView
from kvasir.telemetry.metrics import Metrics


def test_what_waits_and_what_is_done_about_it_is_shown_by_model() -> None:
    metrics = Metrics(CollectorRegistry(), ["m"])
    assert b"kvasir_brownout_level{" not in metrics.render()
    view = AdmissionView(queued=3, wait_s=1.5, kv_tokens=100, brownout=BrownoutView(2, "2; shed=1; shed=0"))
    metrics.track_admission(lambda: {"m": view})
    shown = metrics.render().decode()
    assert 'kvasir_admission_queued{model="m"} 3.0' in shown
    assert 'kvasir_admission_wait_seconds{model="m"} 1.5' in shown
    assert 'kvasir_admission_kv_tokens{model="m"} 100.0' in shown
    assert 'kvasir_brownout_level{model="m"} 2.0' in shown
