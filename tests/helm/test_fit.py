"""What the chart does before an installation and an upgrade: a Job computes whether models fit on the GPUs of
their pools. Its rendered command runs as a process, on folders with the headers of real models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import helm_python
import pytest
from tests.helm.kubelet import Kubelet
from tests.helm.policies import POLICIES, Policy
from tests.helm.rendering import CHART, NAMESPACE, RELEASE, Object, Release, render
from tests.helm.schemas import VERSIONS, violations
from tests.helm.test_installing import Api, api
from tests.kit import public_models as models
from tests.kit.cluster.api_server import api_server
from tests.kit.cluster.discovery import DiscoverableServer, kubeconfig
from tests.kit.hub_server import Hub, serving
from tests.kit.model_folder import write_model

__all__ = ["api"]

NAME, JOB = "llm-kvasir", "llm-kvasir-fit"
LABEL = "nvidia.com/gpu.product"
H100 = "NVIDIA-H100-80GB-HBM3"
HELD: Object = {"enabled": True, "fetch": False, "existingClaim": "weights"}


def values(source: str = "/models/llama", pool: Object | None = None, **more: Any) -> Object:
    """One pool with a GPU, on nodes with H100."""
    wide = {"name": "wide", "role": "both", "gpus": 1, **(pool or {})}
    config = {"model": {"source": source}, "disaggregation": "never", "pools": [wide]}
    given = {"config": config, "poolDefaults": {"nodeSelector": {LABEL: H100}}, "modelCache": HELD}
    return {**given, "redis": {"ray": False}, **more}


def hooks(release: Release) -> list[Object]:
    """The objects that Helm makes before all others, in its order."""
    found = [
        each
        for each in release.objects
        if each["metadata"].get("annotations", {}).get("helm.sh/hook") == "pre-install,pre-upgrade"
    ]
    return sorted(found, key=lambda each: int(each["metadata"]["annotations"]["helm.sh/hook-weight"]))


def pod(release: Release) -> Any:
    return release.one("Job", JOB)["spec"]["template"]["spec"]


def container(release: Release) -> Any:
    (found,) = pod(release)["containers"]
    return found


def claims(release: Release) -> dict[str, str]:
    """The claim at each path of the Job."""
    held = {
        each["name"]: each["persistentVolumeClaim"]["claimName"]
        for each in pod(release)["volumes"]
        if "persistentVolumeClaim" in each
    }
    mounts = container(release)["volumeMounts"]
    assert all(each["readOnly"] for each in mounts if each["name"] in held)
    return {each["mountPath"]: held[each["name"]] for each in mounts if each["name"] in held}


def put_model(kubelet_folder: Path, release: Release, values_: Any) -> None:
    """Put a model into the volume of models as the Job has it."""
    names = [each["name"] for each in pod(release)["volumes"]]
    write(kubelet_folder / "fit" / str(names.index("models")) / "llama", values_)


def write(folder: Path, values_: Any) -> Path:
    """Write a model with the tensors of these values."""
    tensors = models.tensors_of(values_)
    return write_model(folder, values_, {each.name: (each.dtype, each.shape) for each in tensors})


async def fit(folder: Path, release: Release, **environment: str) -> tuple[int, str]:
    """Run the Job; its exit status and its log."""
    kubelet = Kubelet(folder, release, {}, lambda _name: {}, lambda *_: None, environment)
    (job,) = (each for each in release.pods() if each.component == "fit")
    try:
        process = await kubelet.start(job, "fit", "127.0.0.1")
        return await process.wait(), kubelet.output("fit")
    finally:
        await kubelet.close()


def test_the_job_runs_once_before_all_else_and_its_output_reaches_the_user() -> None:
    made = hooks(render(values()))
    assert [each["kind"] for each in made] == ["ConfigMap", "NetworkPolicy", "Job"]
    spec, notes = made[-1]["spec"], made[-1]["metadata"]["annotations"]
    assert spec["backoffLimit"] == 0
    assert notes["helm.sh/hook-output-log-policy"] == "hook-succeeded,hook-failed"
    # Its log can be read after either end, for a day.
    assert notes["helm.sh/hook-delete-policy"] == "before-hook-creation"
    assert spec["ttlSecondsAfterFinished"] == 86400
    assert container(render(values()))["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert spec["activeDeadlineSeconds"] < 300, "what Helm waits for, by default"


def test_there_is_no_job_where_no_pool_has_a_gpu_or_where_it_is_switched_off() -> None:
    assert hooks(render()) == []
    assert hooks(render(values(pool={"engine": {"kind": "sim"}}))) == []
    assert hooks(render(values(fit={"enabled": False}))) == []


def test_there_is_one_where_a_pool_names_its_gpu_and_no_number() -> None:
    pools = [{"name": each, "role": each, "gpu": "L4"} for each in ("prefill", "decode")]
    assert hooks(render({"config": {"pools": pools}}))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_job_keeps_every_policy(policy: Policy) -> None:
    assert list(policy(render(values()))) == []


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_its_objects_are_valid(version: str) -> None:
    assert list(violations(render(values()), version)) == []


IN = {"matchExpressions": [{"key": LABEL, "operator": "In", "values": [H100, "NVIDIA-L4"]}]}
REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [IN]}}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, [f"--gpu=wide={H100}"]),
        ({"pool": {"gpu": "B200"}}, []),
        ({"pools": {"wide": {"gpuResource": "nvidia.com/mig-1g.10gb"}}}, []),
        ({"poolDefaults": {}}, []),
        (
            {"poolDefaults": {"affinity": {"nodeAffinity": REQUIRED}}},
            [f"--gpu=wide={H100}", "--gpu=wide=NVIDIA-L4"],
        ),
    ],
    ids=["nodeSelector", "spec", "part of a GPU", "nothing", "affinity"],
)
def test_the_gpu_is_that_of_the_nodes_that_the_values_select(changed: Any, named: list[str]) -> None:
    arguments = container(render(values(**changed)))["args"]
    assert arguments == ["--fit", "--file=/etc/kvasir/config/kvasir.yaml", *named]


def test_the_labels_of_nodes_are_looked_up_where_that_is_asked_for(api: Api) -> None:
    def node(name: str, **labels: str) -> Object:
        return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}

    items = [node("a", **{LABEL: H100}, pool="llm"), node("b", **{LABEL: "NVIDIA-L4"}), node("c", pool="llm")]
    api.objects["/api/v1/nodes"] = {"apiVersion": "v1", "kind": "NodeList", "items": items}
    given = values(poolDefaults={"nodeSelector": {"pool": "llm"}}, modelCache={})
    assert "--gpu" not in api.render(given)
    shown = api.render({**given, "fit": {"nodes": True}})
    assert f"--gpu=wide={H100}" in shown
    assert "NVIDIA-L4" not in shown


def test_what_is_downloaded_is_read_from_where_it_is_downloaded_with_its_token() -> None:
    cache = {"enabled": True, "existingClaim": "weights", "tokenSecret": "hugging-face"}
    release = render(
        values("owner/model", modelCache=cache, networkPolicy={"models": {"cidrs": ["203.0.113.7/32"]}})
    )
    assert claims(release) == {}
    env = {each["name"]: each.get("value") for each in container(release)["env"]}
    assert env == {"HOME": "/tmp", "HF_HOME": "/tmp", "HF_TOKEN_PATH": "/etc/kvasir/model-token/token"}
    policy = release.one("NetworkPolicy", JOB)["spec"]
    assert policy["egress"][-1]["to"] == [{"ipBlock": {"cidr": "203.0.113.7/32"}}]
    assert [port["port"] for port in policy["egress"][-1]["ports"]] == [443]


def test_a_volume_is_read_where_it_exists_and_can_be_shared() -> None:
    assert claims(render(values())) == {"/models": "weights"}
    alone = {**HELD, "accessModes": ["ReadWriteOnce"]}
    assert claims(render(values(modelCache=alone))) == {}, "it may be on the node of a worker"
    own = {"enabled": True, "fetch": False}
    assert claims(render(values(modelCache=own))) == {}, "the release makes it, after the Job"


def test_a_volume_of_workers_is_mounted_where_a_source_is_on_it() -> None:
    share = {"name": "tmp", "nfs": {"server": "nfs.example", "path": "/weights"}}
    mounts = [{"name": "tmp", "mountPath": "/weights/"}, {"name": "other", "mountPath": "/data"}]
    pool = {"volumes": [share, {"name": "other", "nfs": share["nfs"]}], "volumeMounts": mounts}
    release = render(values("/weights/llama", modelCache={}, pools={"wide": pool}))
    (mount,) = (each for each in container(release)["volumeMounts"] if each["name"].startswith("source"))
    assert mount == {"name": "source-0", "mountPath": "/weights/", "readOnly": True}
    (volume,) = (each for each in pod(release)["volumes"] if each["name"] == "source-0")
    assert volume["nfs"] == share["nfs"]
    assert list(violations(release, VERSIONS[-1])) == []


@asynccontextmanager
async def helm(folder: Path) -> AsyncIterator[tuple[DiscoverableServer, helm_python.Config]]:
    """A cluster in which jobs end when the test says so, and Helm as a person runs it."""
    claim: Object = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    server = DiscoverableServer.of([*render(values()).objects, claim])
    async with api_server(folder, made=server):
        server.tokens["token-of-the-admin"] = "admin"
        with helm_python.Config(
            kubeconfig_content=kubeconfig(server, "token-of-the-admin"),
            namespace=NAMESPACE,
            storage_driver="memory",
        ) as config:
            yield server, config


async def applied(server: DiscoverableServer, config: Any, verb: str, folder: Path, given: Object) -> str:
    """Install or upgrade, with the test as the kubelet and the controller of Jobs; the Job's log. Raises
    HelmError."""
    before = {each["metadata"]["uid"] for each in server.of_kind("Job")}
    running = asyncio.ensure_future(asyncio.to_thread(getattr(config, verb), str(CHART), RELEASE, given))

    def jobs() -> list[Object]:
        named = [each for each in server.of_kind("Job") if each["metadata"]["name"] == JOB]
        return [each for each in named if each["metadata"]["uid"] not in before]

    await server.until(lambda: bool(jobs()))
    status, said = await fit(folder, render(given))
    (job,) = jobs()
    kind = {"type": "Failed", "reason": "BackoffLimitExceeded"} if status else {"type": "Complete"}
    ended = {"conditions": [{**kind, "status": "True"}], "failed" if status else "succeeded": 1}
    server.put(server.collection(job), {**job, "status": ended})
    await running
    return said


@pytest.mark.slow
async def test_an_upgrade_that_does_not_fit_says_by_how_much_and_changes_nothing(tmp_path: Path) -> None:
    async with helm(tmp_path) as (server, config):
        fits, larger = tmp_path / "8b", tmp_path / "70b"
        put_model(fits, render(values()), models.LLAMA_8B)
        said = await applied(server, config, "install", fits, values())
        assert "pool wide: llama fits on H100: 71.2 GiB (0.9 of 79.1) = 15.0 weights" in said
        assert "449,696 tokens" in said

        (before,) = server.of_kind("RayCluster")
        put_model(larger, render(values()), models.LLAMA_70B)
        changed = values(poolDefaults={"nodeSelector": {LABEL: H100}, "startupMinutes": 90})
        with pytest.raises(helm_python.HelmError, match=JOB):
            await applied(server, config, "upgrade", larger, changed)
        refused = (larger / "fit.log").read_text()
        assert "pool wide: llama does not fit on H100 by 63.0 GiB: 71.2 GiB (0.9 of 79.1) - (131.4" in refused
        assert "set engine.tensor_parallel_size: 2 and gpus: 2; or set model.quantization: fp8" in refused
        assert server.of_kind("RayCluster") == [before]


async def test_a_model_that_would_be_downloaded_is_read_at_the_hub_but_not_fetched(tmp_path: Path) -> None:
    hub = Hub({"owner/llama": write(tmp_path / "hub", models.LLAMA_70B)})
    given = values("owner/llama", modelCache={}, networkPolicy={"models": {"cidrs": ["203.0.113.7/32"]}})
    with serving(hub):
        status, said = await fit(tmp_path, render(given), HF_ENDPOINT=hub.url)
    assert status == 1
    assert "pool wide: llama does not fit on H100 by 63.0 GiB" in said
    assert hub.sent_bytes < 1 << 20
    assert "download" not in said


async def test_what_cannot_be_seen_is_no_reason_to_refuse(tmp_path: Path) -> None:
    status, said = await fit(tmp_path, render(values("/elsewhere/llama", modelCache={})))
    assert status == 0
    assert "whether llama fits is not known: there is no /elsewhere/llama on this machine" in said
