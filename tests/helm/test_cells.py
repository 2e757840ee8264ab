"""The chart of one cell of several."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helm.rendering import Release, render, spec_text
from tests.helm.schemas import VERSIONS, violations

from kvasir.config.load.loader import loads

REGIONS = {"name": "eu", "peers": [{"name": "us", "address": "cells.us.example:9443"}]}


def cell(**given: Any) -> Release:
    return render({"router": {"cells": {"enabled": True, **given}}, "config": {"regions": REGIONS}})


def test_by_default_there_is_no_service_for_cells() -> None:
    assert [each for each in render().of_kind("Service") if each["metadata"]["name"].endswith("-cells")] == []


def test_other_cells_reach_the_routers_at_a_service_of_its_own() -> None:
    release = cell(annotations={"a": "b"})
    service = release.one("Service", "llm-kvasir-cells")
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["ports"] == [{"name": "cells", "port": 7443, "targetPort": "cells"}]
    (router,) = [pod for pod in release.pods() if pod.component == "router"]
    assert service["spec"]["selector"].items() <= router.labels.items()
    ports = {
        port["name"]: port["containerPort"] for each in router.containers for port in each.get("ports", [])
    }
    assert ports["cells"] == 7443
    spec = loads(spec_text(release), "kvasir.yaml")
    assert spec.regions is not None
    assert spec.regions.listen == "0.0.0.0:7443"


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_it_is_valid_and_lets_only_the_named_peers_in_and_out(version: str) -> None:
    block = [{"ipBlock": {"cidr": "203.0.113.0/24"}}]
    release = cell(**{"from": block, "to": block})
    assert list(violations(release, version)) == []
    (policy,) = [
        each for each in release.of_kind("NetworkPolicy") if each["metadata"]["name"].endswith("-router")
    ]
    allowed = [each for each in policy["spec"]["ingress"] if each["ports"][0]["port"] == 7443]
    assert [each["from"] for each in allowed] == [block]
    out = [each for each in policy["spec"]["egress"] if each["ports"][0]["port"] == 9443]
    assert [each["to"] for each in out] == [block]
