"""The chart renders its examples to objects that a cluster accepts, and to a spec that processes accept."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import helm_python
import pytest
from tests.helm.rendering import (
    CHART,
    EXAMPLES,
    GOLDEN,
    RELEASE,
    Object,
    Release,
    dashboards,
    everything,
    example,
    golden_text,
    loaded,
    render,
    render_anew,
    spec_text,
    values,
)
from tests.helm.schemas import VERSIONS, violations

from kvasir.config.load.loader import loads
from kvasir.config.load.support import unsupported_features
from kvasir.config.spec.cluster import DEPLOYMENT_LABEL, POOL_LABEL
from kvasir_platform.cluster.ray.pod_templates import (
    REVISION,
    PodTemplate,
    pod_templates,
    pool_resource,
    template_resource,
)

NAMES = [path.stem for path in EXAMPLES]
# The first and the last always; those between where there is time.
SUPPORTED = [
    pytest.param(version, marks=() if version in (VERSIONS[0], VERSIONS[-1]) else pytest.mark.soak)
    for version in VERSIONS
]


@pytest.mark.parametrize("path", EXAMPLES, ids=NAMES)
@pytest.mark.parametrize("version", ["v1.30.0", "v1.37.0"])
def test_strict_lint_finds_nothing_in_an_example(path: Path, version: str) -> None:
    report = helm_python.lint(CHART, values(path), strict=True, kube_version=version)
    # Severity 1 is advice: there is no icon.
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("name", [*NAMES, "everything"])
def test_every_object_is_valid_in_every_supported_version_of_kubernetes(name: str, version: str) -> None:
    release = everything() if name == "everything" else example(name)
    assert list(violations(release, version)) == []


def test_a_field_that_no_schema_knows_is_found() -> None:
    release = example("cpu-try-out")
    (cluster,) = release.of_kind("RayCluster")
    cluster["spec"]["workerGroupSpecs"][0]["maxReplica"] = 3
    release.of_kind("Deployment")[0]["spec"]["replica"] = 3
    found = "\n".join(violations(release, "1.37"))
    assert "maxReplica" in found
    assert "replica" in found.replace("maxReplica", "")


def test_a_release_in_which_every_template_makes_something_renders_as_it_did() -> None:
    """After a wanted change: python -m tests.helm.rendering"""
    assert golden_text() == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_processes_accept_the_spec_that_is_rendered(name: str) -> None:
    release = example(name)
    deployment = loads(spec_text(release), "kvasir.yaml")
    assert deployment.name == f"{RELEASE}-kvasir"
    assert deployment.discovery.kind == "kubernetes"
    assert (deployment.worker.host, deployment.transfer.host) == ("pod", "pod")
    assert deployment.gateway.authenticates
    assert unsupported_features(deployment, platform="cpu" if name.startswith("cpu") else "cuda") == []


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_the_spec_survive_rendering(name: str) -> None:
    """Helm reads numbers as floats: 40 GiB must not become 4.294967296e+10."""
    (given,) = (each.get("config", {}) for each in loaded((CHART / "examples" / f"{name}.yaml").read_text()))
    (rendered,) = loaded(spec_text(example(name)))
    for pool, made in zip(
        given.get("pools", []), rendered["pools"] if given.get("pools") else [], strict=True
    ):
        assert made == pool
    assert rendered.get("slo") == given.get("slo")


@pytest.mark.parametrize("name", NAMES)
def test_routers_find_each_pools_workers_and_no_others(name: str) -> None:
    release = example(name)
    deployment = loads(spec_text(release), "kvasir.yaml")
    found = {}
    for service in release.of_kind("Service"):
        if (pool := service["metadata"]["labels"].get(POOL_LABEL)) is None:
            continue
        assert service["metadata"]["labels"][DEPLOYMENT_LABEL] == deployment.name
        assert service["spec"]["clusterIP"] == "None"
        assert [port["name"] for port in service["spec"]["ports"]] == [deployment.discovery.kubernetes.port]
        selected = [
            pod for pod in release.pods() if service["spec"]["selector"].items() <= pod.labels.items()
        ]
        found[pool] = {pod.of.rpartition(" ")[2] for pod in selected}
        ports = {port["name"]: port["containerPort"] for port in selected[0].spec["containers"][0]["ports"]}
        assert ports["session"] == deployment.worker.port
        assert ports["health"] == deployment.worker.health_port
    assert found == {pool.name: {pool.name} for pool in deployment.pools}


def test_labels_that_kuberay_selects_its_pods_by_are_left_to_it() -> None:
    for pod in example("cpu-try-out").pods():
        if pod.of.startswith("RayCluster/"):
            assert "app.kubernetes.io/name" not in pod.labels
            assert not [label for label in pod.labels if label.startswith("ray.io/")]


def test_a_replica_has_a_pod_of_its_own_with_all_its_devices() -> None:
    (cluster,) = everything().of_kind("RayCluster")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert container["resources"]["limits"]["rdma/hca"] == 1
    assert group["rayStartParams"]["num-gpus"] == "8"
    assert brought(group)["kvasir-pool-wide"] == 1


def brought(group: Object) -> dict[str, int]:
    """What the pods of a group bring for Ray, which KubeRay hands to a shell as it stands."""
    (told,) = shlex.split(group["rayStartParams"]["resources"])
    return dict(json.loads(told))


@pytest.mark.parametrize("name", [*NAMES, "everything"])
def test_the_control_process_is_told_of_which_template_each_pools_pods_are_made(name: str) -> None:
    release = everything() if name == "everything" else example(name)
    (cluster,) = release.of_kind("RayCluster")
    desired = desired_pods(release)
    groups = [each for each in cluster["spec"]["workerGroupSpecs"] if each["groupName"] in desired]
    assert list(desired) == sorted(group["groupName"] for group in groups)
    (config,) = (each["data"] for each in release.of_kind("ConfigMap") if "pods.json" in each["data"])
    assert config["revision"] == "1"
    for group in groups:
        pool, template = group["groupName"], desired[group["groupName"]].template
        assert brought(group) == {pool_resource(pool): 1, template_resource(template): 1, REVISION: 1}
        assert group["template"]["metadata"]["annotations"]["kvasir.dev/template"] == template
        assert desired[pool].pods == group["maxReplicas"]
        # Otherwise a pod that has ended would be started again as it was.
        assert group["template"]["spec"]["restartPolicy"] == "Never"


def desired_pods(release: Release) -> dict[str, PodTemplate]:
    """As the control process reads it."""
    (found,) = (each for each in release.of_kind("ConfigMap") if "pods.json" in each["data"])
    return pod_templates(found["data"]["pods.json"].encode())


def test_without_an_autoscaler_no_pod_can_be_made_beside_the_others() -> None:
    given = {"pools": {"decode": {"maxReplicas": 5}}}
    assert desired_pods(render(given))["decode"].pods == 5
    fixed = render(given | {"ray": {"autoscaler": {"enabled": False}}})
    assert desired_pods(fixed)["decode"].pods == 1


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({"images": {"worker": {"tag": "9.9.9"}}}, {"prefill", "decode"}),
        ({"pools": {"decode": {"nodeSelector": {"gpu": "h200"}}}}, {"decode"}),
        ({"pools": {"decode": {"podAnnotations": {"mesh": "off"}}}}, {"decode"}),
        ({"pools": {"decode": {"podLabels": {"mesh": "off"}}}}, {"decode"}),
        ({"poolDefaults": {"env": [{"name": "A", "value": "1"}]}}, {"prefill", "decode"}),
        ({"pools": {"decode": {"maxReplicas": 5}}}, set()),
        ({"config": {"routing": {"queue_timeout_s": 9}}}, set()),
        ({"router": {"replicas": 5}, "commonLabels": {"team": "models"}}, set()),
    ],
    ids=["image", "one pool's nodes", "annotations", "labels", "variables", "room", "routing", "routers"],
)
def test_pods_are_replaced_for_what_they_have_been_given_and_for_nothing_else(
    given: Object, moved: set[str]
) -> None:
    before, after = desired_pods(render()), desired_pods(render(given))
    assert {pool for pool in before if before[pool].template != after[pool].template} == moved


@pytest.mark.parametrize("name", NAMES)
def test_every_volume_that_is_mounted_is_there_and_every_object_it_names(name: str) -> None:
    release = example(name)
    # Secrets that the example's user brings, and those that cert-manager fills.
    brought = {"hugging-face", "kvasir-clients", "kvasir-operator"} | {
        each["spec"]["secretName"] for each in release.of_kind("Certificate")
    }
    kinds = {"configMap": ("ConfigMap", "name"), "secret": ("Secret", "secretName")}
    made = {(each["kind"], each["metadata"]["name"]) for each in release.objects}
    for pod in release.pods():
        volumes = {each["name"]: each for each in pod.spec.get("volumes", [])}
        assert len(volumes) == len(pod.spec.get("volumes", []))
        for container in pod.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths), pod.of
            for mount in container.get("volumeMounts", []):
                claimed = name_of_claims(release)
                assert mount["name"] in volumes or mount["name"] in claimed, (pod.of, mount)
        for volume in volumes.values():
            for kind, (of, key) in kinds.items():
                if kind in volume and volume[kind][key] not in brought:
                    assert (of, volume[kind][key]) in made, (pod.of, volume)


def name_of_claims(release: Release) -> set[str]:
    """Volumes that a StatefulSet makes for its pods."""
    return {
        claim["metadata"]["name"]
        for each in release.of_kind("StatefulSet")
        for claim in each["spec"].get("volumeClaimTemplates", [])
    }


def test_a_worker_reads_the_key_of_its_own_pool_only() -> None:
    for pod in example("cpu-try-out").pods():
        (tls,) = [each["secret"] for each in pod.spec["volumes"] if each["name"] == "tls"] or [None]
        if pod.component == "worker":
            pool = pod.labels[POOL_LABEL]
            assert tls is not None
            assert [item["path"] for item in tls["items"]] == ["ca.pem", f"worker-{pool}.pem"]
        elif pod.component == "router":
            assert tls is not None
            assert [item["path"] for item in tls["items"]] == ["ca.pem", "router.pem"]
        else:
            assert tls is None


@pytest.mark.parametrize("name", NAMES)
def test_streams_may_end_before_a_pod_is_killed(name: str) -> None:
    release = example(name)
    deployment = loads(spec_text(release), "kvasir.yaml")
    for pod in release.pods():
        grace = pod.spec.get("terminationGracePeriodSeconds", 30)
        if pod.component == "router":
            (container,) = pod.spec["containers"]
            before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert before >= 5
            assert grace > before + deployment.gateway.drain_timeout_s
        elif pod.component == "worker":
            (container,) = pod.spec["containers"]
            (told,) = (float(each.partition("=")[2]) for each in container["args"] if "--grace-s" in each)
            assert deployment.worker.drain_s < told <= grace - 20


def test_a_change_of_the_spec_replaces_routers() -> None:
    def mark(release: Release) -> str:
        (deployment,) = release.of_kind("Deployment")
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["kvasir.dev/config"])

    before = render()
    assert mark(before) == mark(render_anew())
    assert mark(before) != mark(render({"config": {"routing": {"queue_timeout_s": 9}}}))


def test_streams_pass_an_ingress_and_a_gateway_unbuffered_and_unbounded() -> None:
    release = everything()
    (ingress,) = release.of_kind("Ingress")
    notes = ingress["metadata"]["annotations"]
    assert notes["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert int(notes["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 3600
    (route,) = release.of_kind("HTTPRoute")
    assert route["spec"]["rules"][0]["timeouts"] == {"request": "0s", "backendRequest": "0s"}


def test_a_worker_learns_its_place_from_its_own_pod_and_needs_no_permission() -> None:
    labels = {"rack": "topology.example.com/rack", "zone": "example.com/room"}
    release = render({"config": {"discovery": {"kubernetes": {"node_labels": labels}}}})
    for pod in release.pods():
        named = {variable["name"]: variable for variable in pod.spec["containers"][0].get("env", [])}
        paths = {
            name: named[name]["valueFrom"]["fieldRef"]["fieldPath"]
            for name in ("KVASIR_NODE", "KVASIR_ZONE", "KVASIR_RACK", "KVASIR_NVLINK_DOMAIN")
            if name in named
        }
        assert paths == {
            "KVASIR_NODE": "spec.nodeName",
            "KVASIR_ZONE": "metadata.labels['example.com/room']",
            "KVASIR_RACK": "metadata.labels['topology.example.com/rack']",
            "KVASIR_NVLINK_DOMAIN": "metadata.labels['nvidia.com/gpu.clique']",
        } or (not paths and pod.component != "worker")
    assert release.of_kind("ClusterRole") == []
    assert "KVASIR_RACK" not in str(render({}).objects)


def test_the_startup_probe_of_a_worker_reads_what_its_replica_writes() -> None:
    release = render({})
    for pod in (pod for pod in release.pods() if pod.component == "worker"):
        (container,) = pod.spec["containers"]
        probe = container["startupProbe"]["exec"]["command"]
        assert probe == ["python", "-m", "kvasir_platform.apps.worker_probe", "--port=7002"]
        notice = next(each["value"] for each in container["env"] if each["name"] == "KVASIR_START_NOTICE")
        assert Path(notice).parent == Path(
            next(each["mountPath"] for each in container["volumeMounts"] if each["name"] == "tmp")
        )
        assert container["readinessProbe"]["grpc"] == {"port": 7002}


def test_dashboards_are_loaded_by_the_label_of_grafanas_sidecar() -> None:
    shown = {
        "enabled": True,
        "labels": {"grafana_dashboard": "yes"},
        "annotations": {"grafana_folder": "LLM"},
    }
    made = dashboards(render({"monitoring": {"dashboards": shown}}))
    files = {path.name: path.read_text("utf-8") for path in (CHART / "files" / "dashboards").glob("*.json")}
    assert {name: text for each in made for name, text in each["data"].items()} == {
        name: text.rstrip("\n") for name, text in files.items()
    }
    for each in made:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "yes"
        assert each["metadata"]["annotations"] == {"grafana_folder": "LLM"}
    assert dashboards(render()) == []


def test_the_console_has_a_port_of_its_own_that_leads_to_one_router() -> None:
    shown = render({"router": {"console": {"enabled": True, "port": 9000}}})
    console, served = shown.one("Service", "llm-kvasir-console"), shown.one("Service", "llm-kvasir-router")
    assert console["spec"]["ports"] == [{"name": "http", "port": 9000, "targetPort": "console"}]
    assert console["spec"]["selector"] == served["spec"]["selector"]
    assert console["spec"]["sessionAffinity"] == "ClientIP"
    assert console["spec"]["type"] == "ClusterIP"
    deployment = loads(spec_text(shown), "kvasir.yaml")
    port = deployment.gateway.console.port
    (router,) = (pod for pod in shown.pods() if pod.of == "Deployment/llm-kvasir-router")
    assert {"name": "console", "containerPort": port} in router.containers[0]["ports"]
    assert port != deployment.gateway.port
    assert not [each for each in render().of_kind("Service") if each["metadata"]["name"].endswith("-console")]
    assert loads(spec_text(render()), "kvasir.yaml").gateway.console.port is None


def test_only_named_peers_connect_to_the_port_of_the_console() -> None:
    def ports(console: Object) -> list[list[int]]:
        policy = render({"router": {"console": console}}).one("NetworkPolicy", "llm-kvasir-router")
        return [[port["port"] for port in rule["ports"]] for rule in policy["spec"]["ingress"]]

    admin = {"namespaceSelector": {"matchLabels": {"name": "admin"}}}
    assert ports({}) == ports({"enabled": True}) == [[8000]]
    assert ports({"enabled": True, "from": [admin]}) == [[8000], [8001]]
    shown = render({"router": {"console": {"enabled": True, "from": [admin]}}})
    assert shown.one("NetworkPolicy", "llm-kvasir-router")["spec"]["ingress"][1]["from"] == [admin]
