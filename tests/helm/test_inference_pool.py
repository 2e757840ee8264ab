"""The InferencePool of the chart, and its endpoint picker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helm.policies import POLICIES, Policy
from tests.helm.rendering import Object, Release, render
from tests.helm.schemas import VERSIONS, violations
from tests.kit.cluster.api_server import api_server
from tests.kit.gateway.api_requests import Rule

from kvasir_platform.cli.main import parser
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.api import ApiServer as KubernetesServer
from kvasir_platform.picker.pool_members import PoolMembers

NAME = "llm-kvasir-picker"


def pool(**given: Any) -> Release:
    return render({"inferencePool": {"enabled": True, **given}})


def container(release: Release) -> Object:
    (found,) = release.one("Deployment", NAME)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_by_default_there_is_none() -> None:
    assert render().of_kind("InferencePool") == []
    assert "picker" not in {pod.component for pod in render().pods()}


def test_the_pool_has_the_routers_and_names_the_picker_that_serves_it() -> None:
    release = pool()
    spec = release.one("InferencePool", NAME)["spec"]
    (router,) = [pod for pod in release.pods() if pod.component == "router"]
    assert spec["selector"]["matchLabels"].items() <= router.labels.items()
    ports = [port["containerPort"] for each in router.containers for port in each.get("ports", [])]
    assert [each["number"] for each in spec["targetPorts"]] == ports
    service = release.one("Service", spec["endpointPickerRef"]["name"])
    assert service["spec"]["ports"][0]["port"] == spec["endpointPickerRef"]["port"]["number"] == 9002
    (picker,) = [pod for pod in release.pods() if pod.component == "picker"]
    assert service["spec"]["selector"].items() <= picker.labels.items()


def test_other_model_servers_can_be_picked() -> None:
    release = pool(selector={"app": "vllm"}, targetPorts=[8000, 8001], failureMode="FailClose")
    spec = release.one("InferencePool", NAME)["spec"]
    assert spec["selector"] == {"matchLabels": {"app": "vllm"}}
    assert spec["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    assert spec["endpointPickerRef"]["failureMode"] == "FailClose"


@pytest.mark.parametrize("secret", ["", "picker-tls"])
def test_the_command_line_understands_what_the_picker_is_started_with(secret: str) -> None:
    started = container(pool(picker={"maxRequests": 64, "tls": {"secretName": secret}}))
    assert started["command"][:3] == ["python", "-m", "kvasir_platform.cli.main"]
    args = parser().parse_args([*started["command"][3:], *started["args"]])
    assert (args.command, args.pool, args.port, args.max_requests) == ("picker", NAME, 9002, 64)
    assert (args.tls_cert is not None) == bool(secret)
    assert ("grpc" in started["readinessProbe"]) != bool(secret)


def test_the_route_of_a_gateway_leads_to_the_pool() -> None:
    release = render(
        {
            "inferencePool": {"enabled": True},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
        }
    )
    (route,) = release.of_kind("HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": NAME}
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_it_keeps_every_policy(policy: Policy) -> None:
    assert list(policy(pool(picker={"tls": {"secretName": "picker-tls"}}))) == []


def test_every_object_is_valid() -> None:
    assert list(violations(pool(selector={"app": "vllm"}), VERSIONS[-1])) == []


async def test_the_picker_may_read_the_pool_and_its_pods_and_nothing_else(tmp_path: Path) -> None:
    release = pool()
    (role,) = [each for each in release.of_kind("Role") if each["metadata"]["name"] == NAME]
    inference_pool = release.one("InferencePool", NAME)
    async with api_server(tmp_path) as server:
        server.rules["system:serviceaccount:default:router"] = Rule.of_role(role)
        access = Access.in_cluster(server.write_credentials(tmp_path / "access"), server.environment())
        namespace = inference_pool["metadata"]["namespace"]
        server.put(
            f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools", inference_pool
        )
        for name, labels in (
            ("a", inference_pool["spec"]["selector"]["matchLabels"]),
            ("b", {"app": "other"}),
        ):
            status = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
            pod = {"metadata": {"name": name, "labels": labels}, "status": status}
            server.put(f"/api/v1/namespaces/{namespace}/pods", pod)
        found = await PoolMembers(KubernetesServer(access, timeout_s=5.0), namespace, NAME).read()
        assert found == frozenset({"10.0.0.1:8000"})
        assert [(each.verb, each.resource) for each in server.asked] == [
            ("list", "inferencepools"),
            ("list", "pods"),
        ]
