"""An engine over several pods in the chart: a second group of pods, which routers do not discover."""

from __future__ import annotations

import helm_python
import pytest
from tests.helm.policies import POLICIES, Policy
from tests.helm.rendering import Object, Release, render
from tests.helm.schemas import violations

RANK = "kvasir.dev/rank"
WIDE: Object = {
    "name": "wide",
    "role": "both",
    "replicas": 2,
    "gpus": 8,
    "engine": {"tensor_parallel_size": 8, "pipeline_parallel_size": 3, "nodes": 3},
}


def over_three(**pool: object) -> Release:
    return render({"config": {"disaggregation": "never", "pools": [WIDE]}, "pools": {"wide": pool}})


def groups(release: Release) -> tuple[Object, Object]:
    (cluster,) = release.of_kind("RayCluster")
    first, further = cluster["spec"]["workerGroupSpecs"]
    return first, further


def test_each_engine_has_its_first_pod_and_the_others() -> None:
    first, further = groups(over_three(minReplicas=1, maxReplicas=4))
    assert [first[each] for each in ("minReplicas", "replicas", "maxReplicas")] == [1, 2, 4]
    assert [further[each] for each in ("minReplicas", "replicas", "maxReplicas")] == [2, 4, 8]
    assert further["groupName"] == "wide-followers"


def test_a_replica_takes_a_first_pod_and_its_nodes_the_others_of_the_same_template() -> None:
    first, further = (group["rayStartParams"]["resources"] for group in groups(over_three()))
    assert first.replace("kvasir-pool-wide", "kvasir-follower-wide") == further
    assert "kvasir-template-" in further
    first, further = (group["rayStartParams"] for group in groups(over_three()))
    assert first["num-gpus"] == further["num-gpus"] == "8"


def test_routers_find_an_engine_at_its_first_pod_only() -> None:
    release = over_three()
    first, further = (group["template"]["metadata"]["labels"] for group in groups(release))
    service = release.one("Service", "llm-kvasir-pool-wide")
    selector = service["spec"]["selector"].items()
    assert selector <= first.items()
    assert not selector <= further.items()


def test_pods_that_serve_no_sessions_have_no_secret_of_theirs_and_no_probe() -> None:
    first, further = (group["template"]["spec"] for group in groups(over_three()))
    (serves,), (follows,) = first["containers"], further["containers"]
    assert first["restartPolicy"] == further["restartPolicy"] == "Never"
    secrets = {volume["secret"]["secretName"] for volume in further["volumes"] if "secret" in volume}
    assert secrets == {"llm-kvasir-ray"}
    assert {each["name"] for each in follows["volumeMounts"]} == {each["name"] for each in further["volumes"]}
    assert [port["name"] for port in follows["ports"]] == ["raylet"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert follows[probe]["tcpSocket"] == {"port": "raylet"}
        assert "grpc" not in follows[probe]
    same = set(serves) - {"ports", "volumeMounts", "startupProbe", "readinessProbe"}
    assert {key: follows[key] for key in same} == {key: serves[key] for key in same}


def test_an_eviction_takes_one_engine_at_a_time() -> None:
    release = over_three()
    for name, rank, least in (("pool-wide", "0", 1), ("pool-wide-followers", "follower", 2)):
        budget = release.one("PodDisruptionBudget", f"llm-kvasir-{name}")["spec"]
        assert budget["minAvailable"] == least
        assert budget["selector"]["matchLabels"][RANK] == rank


def test_the_template_of_either_group_is_part_of_the_digest() -> None:
    first, further = (group["template"]["metadata"]["annotations"] for group in groups(over_three()))
    assert first == further
    assert first["kvasir.dev/template"]
    fewer = render({"config": {"disaggregation": "never", "pools": [WIDE | {"engine": {}}]}})
    (cluster,) = fewer.of_kind("RayCluster")
    (only,) = cluster["spec"]["workerGroupSpecs"]
    assert only["template"]["metadata"]["annotations"] != first


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.__name__))
def test_it_keeps_every_policy(policy: Policy) -> None:
    assert list(policy(over_three())) == []


def test_every_object_is_valid() -> None:
    assert list(violations(over_three(), "1.37")) == []


def test_a_pool_that_is_called_as_the_further_pods_are_is_refused() -> None:
    other = {"name": "wide-followers", "role": "both"}
    with pytest.raises(helm_python.HelmRenderError, match="wide-followers, as another pool is"):
        render({"config": {"disaggregation": "never", "pools": [WIDE, other]}})
