"""The objects that the chart renders for each example contain what the example configures."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.helm.rendering import CHART, EXAMPLES, Object, Release, example, loaded

from kvasir.config.spec.cluster import POOL_LABEL

NAMES = [path.stem for path in EXAMPLES]
# Kinds that only some values make.
OPTIONAL = {
    "Certificate",
    "HTTPRoute",
    "HorizontalPodAutoscaler",
    "Ingress",
    "Issuer",
    "PersistentVolumeClaim",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "ServiceMonitor",
}
KINDS = {
    "autoscaled": {"PersistentVolumeClaim", "PrometheusRule", "ServiceMonitor"},
    "cpu-try-out": set(),
    "one-engine-two-nodes": {"PersistentVolumeClaim"},
    "one-node-8-gpus": {"Ingress", "PersistentVolumeClaim"},
    "rdma-prefill-decode": {
        "Certificate",
        "HTTPRoute",
        "PersistentVolumeClaim",
        "PrometheusRule",
        "ScaledObject",
        "ServiceMonitor",
    },
    "wide-experts-two-nodes": {"PersistentVolumeClaim"},
    "small-gpus": {
        "HorizontalPodAutoscaler",
        "Ingress",
        "PersistentVolumeClaim",
        "PodMonitor",
        "PrometheusRule",
    },
}
# The least, first and most pods of each group.
PODS = {
    "autoscaled": {"prefill": (1, 2, 8), "decode": (1, 2, 4)},
    "cpu-try-out": {"prefill": (1, 1, 2), "decode": (1, 1, 2)},
    "one-engine-two-nodes": {"wide": (2, 2, 2), "wide-followers": (2, 2, 2)},
    "one-node-8-gpus": {"prefill": (2, 2, 2), "decode": (6, 6, 6)},
    "rdma-prefill-decode": {"prefill": (2, 2, 6), "decode": (4, 4, 12)},
    "wide-experts-two-nodes": {"wide": (2, 2, 2), "wide-followers": (2, 2, 2)},
    "small-gpus": {"serve": (2, 4, 8), "vectors": (1, 1, 1)},
}


def given(name: str) -> Any:
    (values,) = loaded((CHART / "examples" / f"{name}.yaml").read_text())
    return values


def groups(release: Release) -> dict[str, Object]:
    """The groups of worker pods by name."""
    (cluster,) = release.of_kind("RayCluster")
    return {each["groupName"]: each for each in cluster["spec"]["workerGroupSpecs"]}


def router(release: Release) -> Any:
    return release.one("Deployment", "llm-kvasir-router")["spec"]


@pytest.mark.parametrize("name", NAMES)
def test_objects_that_are_optional_are_made_where_they_are_asked_for(name: str) -> None:
    assert {each["kind"] for each in example(name).objects} & OPTIONAL == KINDS[name]


@pytest.mark.parametrize("name", NAMES)
def test_each_pool_has_a_group_of_that_many_pods(name: str) -> None:
    made = {
        group: tuple(each[key] for key in ("minReplicas", "replicas", "maxReplicas"))
        for group, each in groups(example(name)).items()
    }
    assert made == PODS[name]


@pytest.mark.parametrize("name", NAMES)
def test_pods_of_a_pool_have_the_resources_and_the_nodes_that_are_asked_for(name: str) -> None:
    values = given(name)
    pools = {pool["name"]: pool for pool in values.get("config", {}).get("pools", [])}
    for group, made in groups(example(name)).items():
        pool = pools.get(group.removesuffix("-followers"), {})
        asked = values.get("poolDefaults", {}) | values.get("pools", {}).get(pool.get("name"), {})
        spec = made["template"]["spec"]
        (container,) = spec["containers"]
        engine = pool.get("engine", {})
        ranks = math.prod(engine.get(f"{each}_parallel_size", 1) for each in ("tensor", "pipeline", "data"))
        gpus = ranks // engine.get("nodes", 1) if "gpu" in pool else 0
        extended = {"nvidia.com/gpu": gpus} if gpus else {}
        if "rdma" in asked:
            extended[asked["rdma"]["resource"]] = asked["rdma"]["count"]
        assert container["resources"] == {
            "requests": asked["resources"]["requests"] | extended,
            "limits": asked["resources"]["limits"] | extended,
        }
        assert made["rayStartParams"]["num-gpus"] == str(gpus)
        assert made["rayStartParams"]["num-cpus"] == str(pool.get("cpus", 1))
        assert container["image"] == f"kvasir/worker:{values['images']['worker']['tag']}"
        assert spec.get("nodeSelector") == asked.get("nodeSelector")
        assert spec.get("tolerations") == asked.get("tolerations")
        assert [each for each in container["env"] if each in asked.get("env", [])] == asked.get("env", [])
        volumes = {each["name"]: each for each in spec["volumes"]}
        (shared,) = (each for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm")
        memory = volumes[shared["name"]]["emptyDir"]
        assert memory == {"medium": "Memory", "sizeLimit": asked["sharedMemory"]}
        assert made["template"]["metadata"]["labels"][POOL_LABEL] == pool.get("name", group)


def test_pods_have_a_disk_where_there_is_a_disk_tier_of_their_pools_size_or_the_charts() -> None:
    for name in NAMES:
        sizes = {}
        for group, made in groups(example(name)).items():
            spec = made["template"]["spec"]
            mounts = {each["mountPath"]: each["name"] for each in spec["containers"][0]["volumeMounts"]}
            volumes = {each["name"]: each for each in spec["volumes"]}
            if "/var/lib/kvasir/kv" in mounts:
                sizes[group] = volumes[mounts["/var/lib/kvasir/kv"]]["emptyDir"]["sizeLimit"]
        assert sizes == ({"serve": "60Gi", "vectors": "20Gi"} if name == "small-gpus" else {})


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_may_take_as_long_to_start_as_its_model_takes_to_load(name: str) -> None:
    values = given(name)
    for group, made in groups(example(name)).items():
        asked = values.get("poolDefaults", {}) | values.get("pools", {}).get(group, {})
        if "startupMinutes" in asked:
            probe = made["template"]["spec"]["containers"][0]["startupProbe"]
            assert probe["failureThreshold"] * probe["periodSeconds"] == 60 * asked["startupMinutes"]


@pytest.mark.parametrize("name", ["cpu-try-out", "rdma-prefill-decode"])
def test_routers_and_the_head_have_the_resources_that_are_asked_for(name: str) -> None:
    release, values = example(name), given(name)
    (container,) = router(release)["template"]["spec"]["containers"]
    assert container["resources"] == values["router"]["resources"]
    if "head" in values:
        (head,) = (pod for pod in release.pods() if pod.component == "head")
        assert head.spec["containers"][0]["resources"] == values["head"]["resources"]


def test_the_try_out_and_one_pod_that_rolls_fit_two_cpus_and_12_gib() -> None:
    release = example("cpu-try-out")
    (cluster,) = release.of_kind("RayCluster")
    autoscaler = cluster["spec"]["autoscalerOptions"]["resources"]["requests"]
    # KubeRay's operator, and the init container with which it makes workers wait for the head.
    operator, waits = {"cpu": "100m", "memory": "512Mi"}, {"cpu": "200m", "memory": "256Mi"}
    asked = {
        pod.of: pod.spec["containers"][0]["resources"]["requests"]
        for pod in release.pods()
        if pod.component != "test"
    }
    workers = [each["template"]["spec"]["containers"][0] for each in groups(release).values()]
    for kind, most in {"cpu": 2000, "memory": 12 << 10}.items():
        pools = [max(_amount(each["resources"]["requests"][kind]), _amount(waits[kind])) for each in workers]
        others = [
            _amount(each[kind]) for of, each in asked.items() if of.rpartition(" ")[2] not in groups(release)
        ]
        total = sum(pools) + sum(others) + _amount(operator[kind]) + _amount(autoscaler[kind])
        assert total + max(pools) <= most, kind


def _amount(text: str) -> int:
    """A quantity of CPU in thousandths, of memory in MiB."""
    if text.endswith("Gi"):
        return int(text[:-2]) << 10
    if text.endswith("Mi"):
        return int(text[:-2])
    return int(text[:-1]) if text.endswith("m") else int(text) * 1000


def test_the_size_of_routers_has_one_owner() -> None:
    assert router(example("cpu-try-out"))["replicas"] == 1
    scaled = example("small-gpus")
    assert "replicas" not in router(scaled)
    assert scaled.one("HorizontalPodAutoscaler", "llm-kvasir-router")["spec"]["maxReplicas"] == 4
    keda = example("rdma-prefill-decode")
    assert "replicas" not in router(keda)
    spec = keda.one("ScaledObject", "llm-kvasir-router")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (3, 12)
    assert spec["scaleTargetRef"]["name"] == "llm-kvasir-router"
    assert spec["triggers"][0]["metadata"]["serverAddress"] == "http://prometheus.monitoring:9090"


def test_rays_autoscaler_makes_pods_unless_it_is_switched_off() -> None:
    for name, idle in {"autoscaled": 120, "small-gpus": 300, "one-node-8-gpus": None}.items():
        (cluster,) = example(name).of_kind("RayCluster")
        assert cluster["spec"]["enableInTreeAutoscaling"] is (idle is not None)
        assert cluster["spec"].get("autoscalerOptions", {}).get("idleTimeoutSeconds") == idle


@pytest.mark.parametrize("name", [name for name in NAMES if "PersistentVolumeClaim" in KINDS[name]])
def test_models_are_fetched_once_to_a_volume_of_that_size(name: str) -> None:
    release, values = example(name), given(name)
    cache, config = values["modelCache"], values["config"]
    claim = release.one("PersistentVolumeClaim", "llm-kvasir-models")["spec"]
    assert claim["resources"]["requests"]["storage"] == cache["size"]
    assert claim.get("storageClassName") == cache.get("storageClass")
    assert claim["accessModes"] == cache.get("accessModes", ["ReadWriteMany"])
    (job,) = (each for each in release.of_kind("Job") if "-models-" in each["metadata"]["name"])
    spec = job["spec"]["template"]["spec"]
    sources = [config["model"]["source"], *(each["source"] for each in config.get("models", []))]
    assert spec["containers"][0]["args"][1:] == [word for source in sources for word in (source, "main")]
    secrets = [each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each]
    assert secrets == ([cache["tokenSecret"]] if "tokenSecret" in cache else [])


def test_hosts_and_gateways_are_those_that_are_named() -> None:
    (ingress,) = example("one-node-8-gpus").of_kind("Ingress")
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ["llm.example.com"]
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example.com"], "secretName": "llm-example-com"}]
    (plain,) = example("small-gpus").of_kind("Ingress")
    assert [rule["host"] for rule in plain["spec"]["rules"]] == ["llm.example.com"]
    assert "tls" not in plain["spec"]
    (route,) = example("rdma-prefill-decode").of_kind("HTTPRoute")
    values = given("rdma-prefill-decode")["httpRoute"]
    assert route["spec"]["parentRefs"] == values["parentRefs"]
    assert route["spec"]["hostnames"] == values["hostnames"]


def test_routers_reach_and_are_reached_by_what_the_values_add() -> None:
    asked = given("rdma-prefill-decode")["networkPolicy"]["router"]
    policy = example("rdma-prefill-decode").one("NetworkPolicy", "llm-kvasir-router")["spec"]
    assert all(rule in policy["egress"] for rule in asked["egress"])
    assert any(all(peer in rule.get("from", []) for peer in asked["from"]) for rule in policy["ingress"])


def test_secrets_and_certificates_of_others_are_used_in_place_of_generated_ones() -> None:
    release = example("rdma-prefill-decode")
    for certificate in release.of_kind("Certificate"):
        issuer = certificate["spec"]["issuerRef"]
        assert (issuer["kind"], issuer["name"]) == ("ClusterIssuer", "internal")
    made = {each["metadata"]["name"] for each in release.of_kind("Secret")}
    assert not made & {"llm-kvasir-api-keys", "llm-kvasir-operator-key"}
    used = [
        source["secret"]["secretName" if "secretName" in source["secret"] else "name"]
        for volume in router(release)["template"]["spec"]["volumes"]
        for source in (volume, *volume.get("projected", {}).get("sources", []))
        if "secret" in source
    ]
    assert "kvasir-clients" in used
    (monitor,) = release.of_kind("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"]["name"] == "kvasir-operator"
    (monitor,) = example("small-gpus").of_kind("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"]["name"] == "llm-kvasir-operator-key"


def test_redis_keeps_its_data_unless_it_is_told_to_have_no_disk() -> None:
    for name in NAMES:
        (redis,) = example(name).of_kind("StatefulSet")
        assert bool(redis["spec"].get("volumeClaimTemplates")) is (name != "cpu-try-out")
