"""Policies on the rendered chart, each shown to detect a violation."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from tests.helm import policies
from tests.helm.policies import POLICIES, Policy
from tests.helm.rendering import EXAMPLES, Object, Release, everything, example, render


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.__name__))
@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES])
def test_an_example_keeps_every_policy(policy: Policy, name: str) -> None:
    assert list(policy(example(name))) == []


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.__name__))
def test_the_chart_as_it_comes_keeps_every_policy(policy: Policy) -> None:
    assert list(policy(render())) == []


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.__name__))
def test_a_pod_that_verifies_the_release_keeps_every_policy(policy: Policy) -> None:
    release = render({"test": {"verify": True}})
    assert "Pod/llm-kvasir-verify" in [pod.of for pod in release.pods()]
    assert list(policy(release)) == []


def test_locking_memory_for_rdma_is_all_that_is_ever_asked_beyond_the_restricted_standard() -> None:
    found = list(policies.no_pod_is_privileged(everything()))
    assert found
    assert {each.partition(": ")[2] for each in found} == {"has capabilities"}
    assert all(" wide" in each for each in found)
    for policy in POLICIES:
        if policy is not policies.no_pod_is_privileged:
            assert list(policy(everything())) == []


def _router(release: Release) -> Any:
    return release.one("Deployment", "llm-kvasir-router")["spec"]["template"]["spec"]


def _container(release: Release) -> Any:
    return _router(release)["containers"][0]


def _secret_volume(release: Release) -> Any:
    return next(volume for volume in _router(release)["volumes"] if "secret" in volume)


def _worker(release: Release) -> Any:
    (cluster,) = release.of_kind("RayCluster")
    return cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]


def _head(release: Release) -> Any:
    (cluster,) = release.of_kind("RayCluster")
    return cluster["spec"]["headGroupSpec"]["template"]["spec"]


def _without(value: Object, key: str) -> None:
    del value[key]


def _tell_the_token(release: Release) -> None:
    token = release.one("Secret", "llm-kvasir-session")["data"]["token"]
    _container(release)["args"].append(f"--banner={base64.b64decode(token).decode()}")


def _hand_the_autoscalers_token_on(release: Release) -> None:
    mount = {"name": "autoscaler-token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
    _head(release)["containers"][0]["volumeMounts"].append(mount)


def _drop(release: Release, kind: str, name: str) -> None:
    release.objects.remove(release.one(kind, name))


def _open(release: Release, component: str, direction: str, other: str, *ports: int) -> None:
    """Let a component speak with another, at these ports or at all."""
    selector = release.one("NetworkPolicy", f"llm-kvasir-{other}")["spec"]["podSelector"]
    rule: Object = {{"ingress": "from", "egress": "to"}[direction]: [{"podSelector": selector}]}
    if ports:
        rule["ports"] = [{"port": port, "protocol": "TCP"} for port in ports]
    release.one("NetworkPolicy", f"llm-kvasir-{component}")["spec"][direction].append(rule)


def _send(release: Release, component: str, cidr: str, *ports: int) -> None:
    """Let a component send to addresses, at these ports or at all."""
    rule: Object = {"to": [{"ipBlock": {"cidr": cidr}}]}
    if ports:
        rule["ports"] = [{"port": port, "protocol": "TCP"} for port in ports]
    release.one("NetworkPolicy", f"llm-kvasir-{component}")["spec"]["egress"].append(rule)


SECRET_VARIABLE = {"name": "X", "valueFrom": {"secretKeyRef": {"name": "llm-kvasir-session", "key": "token"}}}
BREAKS: list[tuple[Policy, Callable[[Release], object]]] = [
    (policies.no_pod_is_privileged, lambda r: _container(r)["securityContext"].update(privileged=True)),
    (policies.no_pod_is_privileged, lambda r: _worker(r)["securityContext"].update(runAsNonRoot=False)),
    (policies.no_pod_is_privileged, lambda r: _without(_worker(r)["securityContext"], "seccompProfile")),
    (policies.no_pod_is_privileged, lambda r: _worker(r).update(hostNetwork=True)),
    (policies.no_pod_is_privileged, lambda r: _without(_container(r)["securityContext"], "capabilities")),
    (
        policies.no_pod_is_privileged,
        lambda r: _container(r)["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    (
        policies.no_pod_is_privileged,
        lambda r: _worker(r)["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    ),
    (policies.no_token_where_none_is_needed, lambda r: _worker(r).update(automountServiceAccountToken=True)),
    (
        policies.no_token_where_none_is_needed,
        lambda r: _without(r.one("ServiceAccount", "llm-kvasir-head"), "automountServiceAccountToken"),
    ),
    (policies.no_token_where_none_is_needed, _hand_the_autoscalers_token_on),
    (
        policies.rights_are_the_least,
        lambda r: r.one("Role", "llm-kvasir-router")["rules"][0]["resources"].append("secrets"),
    ),
    (
        policies.rights_are_the_least,
        lambda r: _without(r.one("Role", "llm-kvasir-certify")["rules"][0], "resourceNames"),
    ),
    (
        policies.rights_are_the_least,
        lambda r: r.objects.append({"kind": "ClusterRole", "metadata": {"name": "all"}}),
    ),
    (policies.limits_are_everywhere, lambda r: _without(_worker(r)["containers"][0]["resources"], "limits")),
    (
        policies.limits_are_everywhere,
        lambda r: _worker(r)["volumes"].append({"name": "x", "emptyDir": {}}),
    ),
    (policies.images_are_named_exactly, lambda r: _container(r).update(image="kvasir/router:latest")),
    (policies.images_are_named_exactly, lambda r: _container(r).update(image="kvasir/router")),
    (
        policies.no_secret_is_in_a_variable_or_an_argument,
        lambda r: _container(r)["env"].append(SECRET_VARIABLE),
    ),
    (
        policies.no_secret_is_in_a_variable_or_an_argument,
        lambda r: _container(r)["args"].append("--session-token=abc"),
    ),
    (policies.no_secret_is_in_a_variable_or_an_argument, _tell_the_token),
    (
        policies.no_secret_is_in_a_variable_or_an_argument,
        lambda r: r.of_kind("RayCluster")[0]["spec"]["gcsFaultToleranceOptions"].update(redisPassword={}),
    ),
    (
        policies.files_of_secrets_are_read_by_their_group_alone,
        lambda r: _without(_secret_volume(r)["secret"], "defaultMode"),
    ),
    (
        policies.files_of_secrets_are_read_by_their_group_alone,
        lambda r: _without(_router(r)["securityContext"], "fsGroup"),
    ),
    (policies.what_serves_is_probed, lambda r: _without(_container(r), "readinessProbe")),
    (policies.what_serves_is_probed, lambda r: _without(_worker(r)["containers"][0], "startupProbe")),
    (
        policies.what_serves_has_a_disruption_budget,
        lambda r: _drop(r, "PodDisruptionBudget", "llm-kvasir-pool-decode"),
    ),
    (
        policies.what_serves_has_a_disruption_budget,
        lambda r: r.one("PodDisruptionBudget", "llm-kvasir-pool-decode")["spec"].update(minAvailable="50%"),
    ),
    (policies.every_pod_has_a_network_policy, lambda r: _drop(r, "NetworkPolicy", "llm-kvasir-worker")),
    (
        policies.every_pod_has_a_network_policy,
        lambda r: r.one("NetworkPolicy", "llm-kvasir-worker")["spec"]["egress"].append({}),
    ),
    (
        policies.every_pod_has_a_network_policy,
        lambda r: r.one("NetworkPolicy", "llm-kvasir-redis")["spec"]["ingress"].append({}),
    ),
    *(
        (policies.nothing_is_sent_beyond_private_addresses, lambda r, each=each: _send(r, *each))
        for each in (
            ("router", "0.0.0.0/0", 443),
            ("worker", "::/0", 443),
            ("head", "8.0.0.0/8", 6379),
            ("models", "0.0.0.0/0", 80),
            ("worker", "10.0.0.0/8"),
        )
    ),
    (
        policies.other_namespaces_are_named_with_a_port,
        lambda r: r.one("NetworkPolicy", "llm-kvasir-worker")["spec"]["egress"][0]["to"][0].update(
            namespaceSelector={}
        ),
    ),
    (
        policies.other_namespaces_are_named_with_a_port,
        lambda r: r.one("NetworkPolicy", "llm-kvasir-worker")["spec"]["egress"][0].pop("ports"),
    ),
    (
        policies.the_api_server_is_reached_by_those_who_need_it,
        lambda r: r.one("NetworkPolicy", "llm-kvasir-worker")["spec"]["egress"].append(
            {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 6443}]}
        ),
    ),
    *(
        (policies.the_head_is_reached_by_routers_at_the_planners_port_only, broken)
        for broken in (
            lambda r: _open(r, "head", "ingress", "router"),
            lambda r: _open(r, "head", "ingress", "router", 6390, 6379),
            lambda r: _open(r, "head", "ingress", "test", 6390),
            lambda r: _open(r, "router", "egress", "head"),
            lambda r: _open(r, "test", "egress", "head", 6390),
        )
    ),
]


@pytest.mark.parametrize(
    ("policy", "broken"), BREAKS, ids=[f"{policy.__name__}-{n}" for n, (policy, _) in enumerate(BREAKS)]
)
def test_a_policy_finds_what_breaks_it(policy: Policy, broken: Callable[[Release], object]) -> None:
    release = example("autoscaled")
    assert list(policy(release)) == []
    broken(release)
    assert list(policy(release)) != []


def test_every_policy_is_broken_at_least_once() -> None:
    assert {policy for policy, _ in BREAKS} == set(POLICIES)


def test_latest_is_refused_before_anything_is_rendered() -> None:
    with pytest.raises(Exception, match="whatever was built last"):
        render({"images": {"router": {"tag": "latest"}}})


def _egress(release: Release, component: str) -> list[Object]:
    rules: list[Object] = release.one("NetworkPolicy", f"llm-kvasir-{component}")["spec"]["egress"]
    return rules


def _blocks(release: Release, component: str) -> dict[str, list[int]]:
    """Addresses outside the cluster that a component may send to, and the ports."""
    return {
        peer["ipBlock"]["cidr"]: [port["port"] for port in rule["ports"]]
        for rule in _egress(release, component)
        for peer in rule["to"]
        if "ipBlock" in peer
    }


def test_workers_and_the_bundled_redis_send_to_nobody_outside_the_release() -> None:
    release = render()
    assert _blocks(release, "worker") == {}
    assert _egress(release, "redis") == []
    assert set(map(tuple, _blocks(release, "router").values())) == {(443, 6443)}, "the API server alone"


def test_a_model_that_is_downloaded_needs_the_addresses_that_it_comes_from() -> None:
    hub = {"config": {"model": {"source": "owner/model"}}}
    with pytest.raises(Exception, match=r"networkPolicy\.models\.cidrs: owner/model is downloaded"):
        render(hub)
    draft = {"speculative": {"method": "draft_model", "model": "owner/draft"}}
    for source, engine in (("s3://bucket/model", {}), ("/models/local", draft)):
        pools = [{"name": "one", "role": "both", "engine": engine}]
        with pytest.raises(Exception, match=r"networkPolicy\.models\.cidrs"):
            render({"config": {"model": {"source": source}, "disaggregation": "never", "pools": pools}})
    mirror = {"models": {"cidrs": ["203.0.113.7/32"]}}
    found = render({**hub, "networkPolicy": mirror})
    assert _blocks(found, "worker") == {"203.0.113.7/32": [443]}
    cached = render({**hub, "networkPolicy": mirror, "modelCache": {"enabled": True}})
    assert _blocks(cached, "worker") == {}
    assert _blocks(cached, "models") == {"203.0.113.7/32": [443]}
    held = {"enabled": True, "fetch": False, "existingClaim": "weights"}
    assert _blocks(render({**hub, "modelCache": held}), "worker") == {}
    render({"config": {"model": {"source": "/models/local"}}})
    render({**hub, "networkPolicy": {"enabled": False}})


def test_no_list_of_addresses_means_none_and_not_all() -> None:
    none: Object = {"cidrs": []}
    redis = {"bundled": False, "url": "rediss://redis.example.com:6380", "tier": True}
    release = render({"networkPolicy": {"redis": none, "apiServer": none}, "redis": redis})
    for policy in release.of_kind("NetworkPolicy"):
        for rule in policy["spec"]["egress"]:
            assert rule["to"]
    assert _blocks(release, "worker") == {}
    reached = render({"networkPolicy": {"redis": {"cidrs": ["203.0.113.9/32"]}}, "redis": redis})
    for component in ("router", "worker", "head"):
        assert _blocks(reached, component)["203.0.113.9/32"] == [6380]
