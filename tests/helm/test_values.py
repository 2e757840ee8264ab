"""Values that the chart refuses, with messages: misspelt ones, and those that the cluster determines."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import runpy
from typing import Any

import helm_python
import pytest
from tests.helm.rendering import (
    CHART,
    Object,
    everything,
    loaded,
    render,
    render_anew,
    spec_text,
    without_chance,
)

from kvasir.config.load.loader import loads
from kvasir.config.spec.deployment import Deployment

TWO_AND_THREE = [
    {"name": "prefill", "role": "prefill", "replicas": 2},
    {"name": "decode", "role": "decode", "replicas": 3},
]


@pytest.mark.parametrize(
    ("given", "path", "word"),
    [
        ({"router": {"replica": 3}}, "/router", "replica"),
        ({"rooter": {}}, "", "rooter"),
        ({"config": {"modle": {}}}, "/config", "modle"),
        ({"config": {"pools": [{"name": "a", "role": "both", "engin": {}}]}}, "/config/pools/0", "engin"),
        ({"config": {"gateway": {"port": "8000"}}}, "/config/gateway/port", "string"),
        ({"pools": {"decode": {"replica": 2}}}, "/pools/decode", "replica"),
        ({"pools": {"decode": {"maxReplicas": 0}}}, "/pools/decode/maxReplicas", "minimum"),
        ({"certificates": {"from": "certmanager"}}, "/certificates/from", "generated"),
        ({"images": {"router": {"digest": "sha256:1234"}}}, "/images/router/digest", "pattern"),
        ({"redis": {"url": "redis://user:word@redis:6379"}}, "/redis/url", "pattern"),
    ],
)
def test_a_mistake_is_refused_with_its_path(given: Object, path: str, word: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refused:
        render(given)
    assert f"at '{path}'" in str(refused.value)
    assert word in str(refused.value)


def test_engine_options_reach_the_processes_as_they_are_written() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    args = {"attention_backend": "FLASHINFER", "compilation_config": {"cudagraph_mode": "FULL"}}
    draft = {"method": "eagle3", "model": "owner/head", "revision": "v1"}
    pool = {"name": "both", "role": "both", "gpus": 1, "engine": {"args": args, "speculative": draft}}
    config = {"disaggregation": "never", "model": {"chat_template": template}, "pools": [pool]}
    mirror = {"models": {"cidrs": ["203.0.113.7/32"]}}
    release = render({"config": config, "modelCache": {"enabled": True}, "networkPolicy": mirror})
    spec = loads(spec_text(release), "kvasir.yaml")
    assert spec.model.chat_template == template
    assert spec.pools[0].engine.args == args
    (job,) = (each for each in release.of_kind("Job") if "-models-" in each["metadata"]["name"])
    fetched = job["spec"]["template"]["spec"]["containers"][0]["args"][1:]
    assert fetched == ["kvasir-tiny", "main", "owner/head", "v1"]


@pytest.mark.parametrize(
    "pool",
    [
        {},
        {"gpus": "auto"},
        {"gpus": 2.0, "gpu": "H100"},
        {"gpus": 0.5},
        {"gpu": "H100"},
        {"gpu": "H100", "engine": {"kind": "sim"}},
        {"gpu": "H100", "engine": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "nodes": 2}},
    ],
)
def test_pods_have_the_gpus_that_the_processes_count(pool: Object) -> None:
    release = render(
        {"config": {"disaggregation": "never", "pools": [{"name": "s", "role": "both", **pool}]}}
    )
    (cluster,) = release.of_kind("RayCluster")
    (spec,) = loads(spec_text(release), "kvasir.yaml").pools
    gpus = math.ceil(spec.reserved_gpus)
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["rayStartParams"]["num-gpus"] == str(gpus)
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus


def test_a_pool_without_gpus_is_refused_where_its_image_needs_them() -> None:
    cuda = {"images": {"worker": {"tag": "0.1.0-cuda"}}}
    with pytest.raises(helm_python.HelmRenderError, match="prefill has no GPU, and its image"):
        render(cuda)
    named = [{"name": each, "role": each, "gpu": "L4"} for each in ("prefill", "decode")]
    assert render({**cuda, "config": {"pools": named}}).of_kind("RayCluster")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"atention_backend": "FLASHINFER"}, "atention_backend"),
        ({"attention_backend": "FLASH"}, "attention_backend"),
        ({"max_num_seqs": 4}, "max_num_seqs"),
    ],
)
def test_the_chart_refuses_arguments_that_the_engine_would_not_take(args: Object, word: str) -> None:
    pool = {"name": "both", "role": "both", "engine": {"args": args}}
    with pytest.raises(helm_python.HelmValuesError) as refused:
        render({"config": {"disaggregation": "never", "pools": [pool]}})
    assert "/config/pools/0/engine/args" in str(refused.value)
    assert word in str(refused.value)


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"name": "mine"}, "config.name"),
        ({"worker": {"host": "127.0.0.1"}}, "config.worker.host"),
        ({"transfer": {"host": "127.0.0.1"}}, "config.transfer.host"),
        ({"discovery": {"kind": "static"}}, "config.discovery.kind"),
        ({"tls": {"mode": "off"}}, "config.tls.mode"),
        ({"tls": {"ca_file": "/ca"}}, "config.tls.ca_file"),
        ({"gateway": {"host": "127.0.0.1"}}, "config.gateway.host"),
        ({"gateway": {"api_keys_file": "/keys"}}, "config.gateway.api_keys_file"),
        ({"gateway": {"tls": {"cert_file": "/a", "key_file": "/b"}}}, "config.gateway.tls"),
        ({"gateway": {"tls": {"client_ca_file": "/a"}}}, "config.gateway.tls.client_ca_file"),
        ({"tenancy": {"cache_secret_file": "/secret"}}, "config.tenancy.cache_secret_file"),
        ({"tenancy": {"redis": {"url": "redis://other:6379"}}}, "config.tenancy.redis.url"),
        ({"ray": {"head_redis_url": "redis://other:6379"}}, "config.ray.head_redis_url"),
    ],
)
def test_what_the_cluster_decides_cannot_be_set_to_something_else(config: Object, path: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=path):
        render({"config": config})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"pools": {"decoder": {}}}, "no pool of that name; it has prefill, decode"),
        ({"pools": {"decode": {"maxReplicas": 2}}, "config": {"pools": TWO_AND_THREE}}, "less than"),
        ({"router": {"autoscaling": {"enabled": True}, "keda": {"enabled": True}}}, "one owner"),
        ({"router": {"keda": {"enabled": True}}}, "address of Prometheus"),
        ({"redis": {"url": "redis://other:6379"}}, "one or the other"),
        ({"redis": {"bundled": False}}, "need a Redis"),
        ({"certificates": {"from": "existingSecret"}}, "router.pem"),
        ({"httpRoute": {"enabled": True}}, "name the Gateway"),
        ({"config": {"transfer": {"kind": "nixl"}}}, "needs RDMA devices.*unauthenticated_tcp: true"),
        (
            {"poolDefaults": {"rdma": {"resource": "hca"}, "env": [{"name": "UCX_TLS", "value": "rc,tcp"}]}},
            "UCX_TLS is rc,tcp, which allows TCP",
        ),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other_are_refused(given: Object, reason: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=reason):
        render(given)


@pytest.mark.parametrize(
    "given",
    [
        {"poolDefaults": {"rdma": {"resource": "rdma/hca"}}},
        {"config": {"transfer": {"nixl": {"unauthenticated_tcp": True}}}},
        {"config": {"disaggregation": "never", "pools": [{"name": "both", "role": "both"}]}},
    ],
)
def test_nixl_is_rendered_with_rdma_devices_or_an_accepted_risk_or_where_nothing_moves(given: Object) -> None:
    config = given.get("config", {})
    transfer = {"kind": "nixl", **config.get("transfer", {})}
    assert render({**given, "config": {**config, "transfer": transfer}}).objects


def test_saying_what_the_chart_says_anyway_is_no_mistake() -> None:
    assert render({"config": {"worker": {"host": "pod"}, "tls": {"mode": "files"}}}).objects


def test_what_the_cluster_does_not_decide_is_the_users() -> None:
    given: Object = {
        "worker": {"port": 9001, "drain_s": 60},
        "tenancy": {"redis": {"timeout_s": 0.2}},
        "discovery": {"kubernetes": {"resync_s": 60}},
        "tls": {"trust_domain": "example.org"},
    }
    # The schema wants a url of a Redis that is named; the chart's own is known only when it renders.
    given["tenancy"]["redis"]["url"] = "redis://llm-kvasir-redis:6379/1"
    deployment = loads(spec_text(render({"config": given})), "kvasir.yaml")
    assert (deployment.worker.port, deployment.worker.drain_s) == (9001, 60)
    assert deployment.discovery.kubernetes.resync_s == 60
    assert deployment.tls.trust_domain == "example.org"
    assert deployment.tenancy.redis is not None
    assert deployment.tenancy.redis.timeout_s == 0.2
    assert deployment.tenancy.redis.password_file == "/etc/kvasir/redis/password"


def test_another_redis_is_used_in_place_of_the_bundled_one() -> None:
    release = render(
        {
            "redis": {
                "bundled": False,
                "url": "rediss://redis.example.com:6380",
                "existingSecret": "redis-password",
                "caSecret": "redis-authority",
            }
        }
    )
    assert not release.of_kind("StatefulSet")
    deployment = loads(spec_text(release), "kvasir.yaml")
    assert deployment.tenancy.redis is not None
    assert deployment.tenancy.redis.url == "rediss://redis.example.com:6380/1"
    assert deployment.tenancy.redis.ca_file == "/etc/kvasir/redis-ca/ca.crt"
    (cluster,) = release.of_kind("RayCluster")
    address = cluster["spec"]["gcsFaultToleranceOptions"]["redisAddress"]
    assert address == "rediss://redis.example.com:6380"
    (rule,) = (
        rule
        for rule in release.one("NetworkPolicy", "llm-kvasir-router")["spec"]["egress"]
        if any(port["port"] == 6380 for port in rule["ports"])
    )
    assert rule["to"]


def test_the_schema_holds_the_whole_deployment_spec() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    spec = Deployment.model_json_schema()
    assert schema["$defs"]["Deployment"]["properties"] == spec["properties"]


def test_two_releases_in_one_namespace_share_no_name_and_no_pod() -> None:
    one, two = everything(), render({"certificates": {"from": "certManager"}}, name="other")

    def names(release: Any) -> set[tuple[str, str]]:
        return {(each["kind"], each["metadata"]["name"]) for each in release.objects}

    assert not names(one) & names(two)
    for each in one.of_kind("Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment"):
        selector = each["spec"].get("selector") or each["spec"]["podSelector"]
        for pod in two.pods():
            assert not selector.get("matchLabels", selector).items() <= pod.labels.items()


def test_releases_with_long_names_are_told_apart() -> None:
    long = "a-release-with-a-name-that-is-too-long-for-kubernetes"
    (one,) = render(name=f"{long[:50]}-x"[:53]).of_kind("RayCluster")
    (two,) = render(name=f"{long[:50]}-y"[:53]).of_kind("RayCluster")
    assert one["metadata"]["name"] != two["metadata"]["name"]
    assert len(one["metadata"]["name"]) <= 40
    pool = "p" * 40
    config = {"disaggregation": "never", "pools": [{"name": pool, "role": "both"}]}
    for each in render({"config": config}, name=long[:53]).objects:
        assert len(each["metadata"]["name"]) <= 63, each["metadata"]["name"]


def test_nothing_but_secrets_differs_between_two_renderings() -> None:
    one, two = render_anew(), render_anew()
    assert without_chance(one).objects == without_chance(two).objects
    assert one.of_kind("Secret") != two.of_kind("Secret")


def test_generated_api_keys_are_hashes_of_the_operators_key() -> None:
    release = render()
    plain = base64.b64decode(release.one("Secret", "llm-kvasir-operator-key")["data"]["api-key"])
    line = base64.b64decode(release.one("Secret", "llm-kvasir-api-keys")["data"]["default"]).decode()
    assert line == f"{hashlib.sha256(plain).hexdigest()} tenant=default\n"
    assert plain.startswith(b"sk-kvasir-")


def test_pages_say_what_values_yaml_and_the_spec_say() -> None:
    """After a change: python helm/values_pages.py"""
    pages = runpy.run_path(str(CHART.parent / "values_pages.py"))["pages"]
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, path


def test_every_value_is_documented_or_named_plainly() -> None:
    """A key without a comment is one that Kubernetes has under the same name, or `enabled`."""
    plain = {
        "enabled", "minReplicas", "maxReplicas", "resources", "podLabels", "podAnnotations", "affinity",
        "serviceAccountAnnotations", "priorityClassName", "runtimeClassName", "nodeSelector", "tolerations",
        "volumes", "volumeMounts", "type", "port", "annotations", "interval", "labels", "hosts", "hostnames",
        "className", "storageClass", "accessModes", "size", "repository", "pullPolicy", "duration",
        "username", "renewBefore", "ingress", "egress", "cidrs", "ports", "kind", "group", "name", "tag",
        "timeouts", "request", "backendRequest",
    }  # fmt: skip
    table = (CHART / "README.md").read_text(encoding="utf-8")
    for line in table.splitlines():
        if not line.startswith("| `"):
            continue
        path, _, text = (cell.strip() for cell in line.strip("|").split("|", 2))
        assert text or path.strip("`").rpartition(".")[2] in plain, path


def test_values_of_an_unset_field_are_no_null() -> None:
    rendered = loaded(spec_text(render()))[0]
    assert "null" not in json.dumps(rendered)
