"""Regions of the spec: what is accepted, and what each mistake is told."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.traffic.regions import host_of

US: dict[str, Any] = {"name": "us", "address": "us.example:7443", "deployment": "kvasir-us"}
AP: dict[str, Any] = {"name": "ap", "address": "[fd00::1]:7443", "network_s": 0.12}


def deployment(regions: dict[str, Any], **changes: Any) -> Deployment:
    spec = {
        "name": "kvasir-eu",
        "tenancy": {"tenants": [{"name": "bank"}]},
        "tls": {"directory": "/etc/kvasir/tls"},
        "regions": {"name": "eu", "listen": "0.0.0.0:7443", "peers": [US, AP], **regions},
    }
    return Deployment.model_validate({**spec, **changes})


def test_a_cell_with_peers_is_valid_and_survives_json() -> None:
    spec = deployment({"residency": {"bank": ["eu"]}})
    assert Deployment.model_validate_json(spec.model_dump_json()) == spec
    assert spec.regions is not None
    assert [peer.certified_as for peer in spec.regions.peers] == ["kvasir-us", "ap"]
    assert spec.regions.hosts == ["0.0.0.0", "us.example", "fd00::1"]
    assert Deployment().regions is None


def test_hosts_are_without_brackets() -> None:
    assert [host_of(each) for each in ("a:1", "[::1]:2", "127.0.0.1:3")] == ["a", "::1", "127.0.0.1"]


@pytest.mark.parametrize(
    ("regions", "changes", "message"),
    [
        ({"peers": [US, US | {"deployment": "other"}]}, {}, "names of cells must differ"),
        ({"peers": [US, AP | {"deployment": "kvasir-us"}]}, {}, "they tell which cell a certificate is of"),
        ({"peers": [US | {"name": "eu"}]}, {}, "names of cells must differ"),
        ({"peers": [US | {"deployment": "kvasir-eu"}]}, {}, "which is this one; cells are told apart"),
        ({"peers": [US | {"address": "us.example"}]}, {}, "peers.0.address"),
        ({"residency": {"bank": ["mars"]}}, {}, "bank names unknown cell 'mars'; the cells are eu, us, ap"),
        ({"residency": {"shop": ["eu"]}}, {}, "unknown tenant 'shop'; list it in tenancy.tenants"),
        ({}, {"tls": {"mode": "off"}}, "is on the network, and tls.mode is off"),
        ({"lost_after_s": 0.1}, {}, "lost_after_s"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(
    regions: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        deployment(regions, **changes)
    assert message in str(refused.value)
