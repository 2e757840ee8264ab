"""Autoscaled pools in the chart: access to the planner, and limits on pods."""

from __future__ import annotations

import json
import re

import helm_python
import pytest
from tests.helm.policies import POLICIES, Policy
from tests.helm.rendering import Object, Pod, Release, render
from tests.helm.schemas import violations
from tests.helm.test_rendering import desired_pods

BOUNDS: Object = {"min": 1, "max": 8}


def sized(
    scaling: Object | None = BOUNDS, *, replicas: int = 1, mode: str | None = None, **own: object
) -> Object:
    """Values of two pools, of which decode has these bounds and these settings of its pods."""
    decode: Object = {"name": "decode", "role": "decode", "replicas": replicas}
    if scaling is not None:
        decode["scaling"] = scaling
    config: Object = {"pools": [{"name": "prefill", "role": "prefill"}, decode]}
    if mode is not None:
        config["scaling"] = {"mode": mode}
    return {"config": config, "pools": {"decode": own}}


def head(release: Release) -> Pod:
    (found,) = (pod for pod in release.pods() if pod.component == "head")
    return found


def argument(pod: Pod, name: str) -> str | None:
    """What the first container of a pod is told by that argument."""
    told = [
        each.removeprefix(f"{name}=") for each in pod.spec["containers"][0]["args"] if each.startswith(name)
    ]
    return told[0] if told else None


def group(release: Release, name: str = "decode") -> Object:
    (cluster,) = release.of_kind("RayCluster")
    (found,) = (each for each in cluster["spec"]["workerGroupSpecs"] if each["groupName"] == name)
    return dict(found)


def bounds(release: Release, name: str = "decode") -> list[int]:
    return [group(release, name)[each] for each in ("minReplicas", "replicas", "maxReplicas")]


@pytest.mark.parametrize("mode", [None, "auto", "advise"])
@pytest.mark.parametrize("name", ["llm", "a-release-with-a-name-that-is-too-long-for-most"])
def test_routers_find_the_planner_in_the_control_process(mode: str | None, name: str) -> None:
    release = render(sized(mode=mode), name=name)
    for router in (pod for pod in release.pods() if pod.component == "router"):
        host, _, port = (argument(router, "--planner") or "").rpartition(":")
        service = release.one("Service", host)
        assert service["spec"]["type"] == "ClusterIP"
        (found,) = service["spec"]["ports"]
        assert found["port"] == int(port) == 6390
        (pod,) = (pod for pod in release.pods() if service["spec"]["selector"].items() <= pod.labels.items())
        assert pod == head(release)
        ports = {each["name"]: each["containerPort"] for each in pod.spec["containers"][0]["ports"]}
        assert argument(pod, "--planner-port") == str(ports[found["targetPort"]])


@pytest.mark.parametrize(
    "given",
    [{}, sized(None), sized(mode="manual"), sized(None, mode="auto")],
    ids=["as it comes", "no bounds", "sizes are left to people", "nothing to size"],
)
def test_where_no_pool_sizes_itself_there_is_nothing_of_the_planner(given: Object) -> None:
    for each in render(given).objects:
        assert not re.search("planner|6390", json.dumps(each)), each["metadata"]["name"]


def test_one_pool_with_bounds_among_others_is_enough() -> None:
    release = render(sized())
    assert argument(head(release), "--planner-port") is not None
    assert bounds(release, "prefill") == [1, 1, 1]


def rules(release: Release, component: str, direction: str, other: str) -> list[Object]:
    """The rules of a component's NetworkPolicy that let it speak with another."""
    policy = release.one("NetworkPolicy", f"llm-kvasir-{component}")["spec"]
    peers = {"ingress": "from", "egress": "to"}[direction]
    return [rule for rule in policy[direction] if f'component": "{other}"' in json.dumps(rule.get(peers, []))]


def test_routers_reach_the_planner_and_nothing_else_of_the_head() -> None:
    release = render(sized())
    for rule in (
        *rules(release, "router", "egress", "head"),
        *rules(release, "head", "ingress", "router"),
    ):
        assert rule["ports"] == [{"port": 6390, "protocol": "TCP"}]
    assert (
        len(rules(release, "router", "egress", "head"))
        == len(rules(release, "head", "ingress", "router"))
        == 1
    )
    for component in ("redis", "certify", "test"):
        assert not rules(release, component, "egress", "head")
        assert not rules(release, "head", "ingress", component)


def test_routers_reach_no_head_without_a_planner() -> None:
    release = render(sized(mode="manual"))
    assert not rules(release, "router", "egress", "head")
    assert not rules(release, "head", "ingress", "router")


@pytest.mark.parametrize(
    ("scaling", "replicas", "own", "expected"),
    [
        ({"min": 2, "max": 8}, 3, {}, [2, 3, 8]),
        ({"max": 8}, 1, {}, [1, 1, 8]),
        ({"min": 0, "max": 1}, 0, {}, [0, 0, 1]),
        ({"min": 0, "max": 4}, 4, {}, [0, 4, 4]),
        ({"min": 2, "max": 8}, 2, {"minReplicas": 0, "maxReplicas": 9}, [0, 2, 9]),
        ({"min": 1, "max": 8}, 1, {"minReplicas": 8}, [8, 1, 8]),
        ({"min": 2, "max": 8}, 2, {"minReplicas": None, "maxReplicas": None}, [2, 2, 8]),
        (None, 3, {}, [3, 3, 3]),
        (None, 0, {}, [0, 0, 1]),
        (None, 2, {"minReplicas": 0, "maxReplicas": 4}, [0, 2, 4]),
    ],
)
def test_a_pools_pods_have_its_bounds_where_nothing_else_is_said(
    scaling: Object | None, replicas: int, own: Object, expected: list[int]
) -> None:
    release = render(sized(scaling, replicas=replicas, **own))
    assert bounds(release) == expected
    assert desired_pods(release)["decode"].pods == expected[2]


def test_what_is_said_of_all_pools_comes_before_their_bounds() -> None:
    release = render(sized() | {"poolDefaults": {"minReplicas": 2, "maxReplicas": 10}})
    assert bounds(release) == [2, 1, 10]


def test_bounds_hold_where_people_set_the_size() -> None:
    assert bounds(render(sized(mode="manual"))) == [1, 1, 8]


def test_pods_of_an_engines_further_nodes_are_bounded_with_it() -> None:
    pool: Object = {"name": "wide", "role": "both", "gpus": 8, "scaling": {"min": 0, "max": 4}, "replicas": 2}
    pool["engine"] = {"tensor_parallel_size": 8, "pipeline_parallel_size": 3, "nodes": 3}
    release = render({"config": {"disaggregation": "never", "pools": [pool]}})
    assert bounds(release, "wide") == [0, 2, 4]
    assert bounds(release, "wide-followers") == [0, 4, 8]


@pytest.mark.parametrize(
    ("scaling", "replicas", "own", "least"),
    [
        ({"min": 0, "max": 8}, 4, {}, 1),
        ({"min": 1, "max": 8}, 4, {}, 1),
        ({"min": 3, "max": 8}, 8, {}, 2),
        ({"min": 0, "max": 8}, 4, {"minAvailable": 0}, 0),
        ({"min": 1, "max": 8}, 4, {"minAvailable": 3}, 3),
        (None, 4, {}, 3),
        (None, 0, {}, 1),
    ],
)
def test_a_drain_of_nodes_goes_on_at_a_pools_smallest_size_and_never_takes_the_last(
    scaling: Object | None, replicas: int, own: Object, least: int
) -> None:
    release = render(sized(scaling, replicas=replicas, **own))
    assert release.one("PodDisruptionBudget", "llm-kvasir-pool-decode")["spec"]["minAvailable"] == least


def test_other_bounds_replace_no_pod() -> None:
    before, after = desired_pods(render(sized())), desired_pods(render(sized({"min": 0, "max": 4})))
    assert before["decode"].template == after["decode"].template
    assert before["decode"].pods != after["decode"].pods


FIXED: Object = {"ray": {"autoscaler": {"enabled": False}}}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (sized(maxReplicas=7), r"pools\.decode\.maxReplicas: 7 is less than scaling\.max 8"),
        (sized(minReplicas=9, maxReplicas=9), r"pools\.decode\.minReplicas: 9 is more than scaling\.max 8"),
        (sized(mode="manual", maxReplicas=7), r"pools\.decode\.maxReplicas"),
        (sized(replicas=9), r"config\.pools: decode begins with replicas 9.* between 1 and 8"),
        (sized({"min": 2, "max": 8}), r"config\.pools: decode begins with replicas 1.* between 2 and 8"),
        (sized() | FIXED, r"ray\.autoscaler\.enabled: .* decode beyond its 1.* is 8; enable it"),
        (sized(mode="advise") | FIXED, r"ray\.autoscaler\.enabled: "),
    ],
)
def test_room_that_contradicts_a_pools_bounds_is_refused_with_its_path(given: Object, path: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=path):
        render(given)


@pytest.mark.parametrize(
    "given",
    [sized(mode="manual"), sized({"min": 1, "max": 4}, replicas=4), sized(None)],
    ids=["sizes are left to people", "all pods are there from the beginning", "no bounds"],
)
def test_without_an_autoscaler_pools_may_use_the_pods_that_are_there(given: Object) -> None:
    release = render(given | FIXED)
    assert desired_pods(release)["decode"].pods == group(release)["replicas"]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.__name__))
def test_it_keeps_every_policy(policy: Policy) -> None:
    assert list(policy(render(sized({"min": 0, "max": 8}, replicas=0)))) == []


def test_every_object_is_valid() -> None:
    assert list(violations(render(sized({"min": 0, "max": 8}, replicas=0)), "1.37")) == []
