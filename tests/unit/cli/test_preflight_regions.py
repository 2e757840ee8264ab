"""What `kvasir check` says of the cells of other regions."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.config.spec.deployment import Deployment
from kvasir_platform.cluster.preflight.checks import region_findings

US = {"name": "us", "address": "us.example:7443"}


def found(regions: dict[str, Any] | None, **changes: Any) -> list[tuple[str, str]]:
    spec = {} if regions is None else {"name": "kvasir-eu", "regions": {"name": "eu", **regions}}
    deployment = Deployment.model_validate({**spec, **changes})
    return [(each.level, each.message) for each in region_findings(deployment)]


def test_without_regions_there_is_nothing_to_say() -> None:
    assert found(None) == []


@pytest.mark.parametrize(
    ("regions", "changes", "severity", "message"),
    [
        ({"peers": [US]}, {}, "error", "us.example is on the network, and no certificate is named"),
        ({"peers": []}, {}, "warning", "cell eu has no peers"),
        (
            {"peers": [{"name": "us", "address": "127.0.0.1:1"}]},
            {
                "tenancy": {
                    "tenants": [{"name": "acme", "requests_per_min": 5}],
                    "redis": {"url": "redis://127.0.0.1:6379/1"},
                }
            },
            "warning",
            "limits of acme are shared by the routers of this cell in Redis, and not with other cells",
        ),
    ],
)
def test_what_is_missing_is_named(
    regions: dict[str, Any], changes: dict[str, Any], severity: str, message: str
) -> None:
    ((kind, text),) = found(regions, **changes)
    assert kind == severity
    assert message in text


def test_a_cell_with_certificates_and_peers_is_fine() -> None:
    assert found({"listen": "0.0.0.0:7443", "peers": [US]}, tls={"directory": "/etc/kvasir/tls"}) == []
