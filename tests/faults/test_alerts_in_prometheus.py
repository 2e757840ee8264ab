"""A real Prometheus finds a fault in a fleet that runs in real time, with the chart's alerts at 1/30 of their
windows and waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from load_tests.scenarios.alerts.recognition import recognize, report_rows
from tests.kit.observability.mix import FAULTS


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", ["bad worker", "failing workers", "tier in trouble"])
async def test_prometheus_fires_the_alert_of_a_fault(name: str, tmp_path: Path) -> None:
    (fault,) = (each for each in FAULTS if each.name == name)
    found = await recognize(fault, tmp_path)
    assert fault.alert in found.alerts
    assert found.named_s is not None
    assert found.named_s <= found.alerts[fault.alert]
    assert found.moved <= found.shown
    assert len(report_rows([found])) == 4
