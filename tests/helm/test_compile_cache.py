"""A volume for compiled code in the chart, which workers write and no other pod has."""

from __future__ import annotations

import helm_python
import pytest
from tests.helm.policies import POLICIES, Policy
from tests.helm.rendering import Object, Release, render, spec_text
from tests.helm.schemas import violations

import kvasir.config.load.loader as spec
from kvasir.config.spec.deployment import Deployment

WIDE: Object = {"name": "wide", "role": "both", "gpus": 2, "engine": {"tensor_parallel_size": 4, "nodes": 2}}


def kept(**cache: object) -> Release:
    config = {"disaggregation": "never", "pools": [WIDE]}
    return render({"config": config, "compileCache": {"enabled": True, **cache}})


def deployed(release: Release) -> Deployment:
    return spec.loads(spec_text(release), "kvasir.yaml")


def test_by_default_there_is_no_volume() -> None:
    assert deployed(render()).worker.compile_cache_dir is None
    assert "compiled" not in str(render().objects)


def test_every_node_of_an_engine_writes_to_the_claim() -> None:
    release = kept(size="50Gi", storageClass="fast")
    claim = release.one("PersistentVolumeClaim", "llm-kvasir-compiled")["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("fast", "50Gi")
    (cluster,) = release.of_kind("RayCluster")
    for group in cluster["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        volume = {"name": "compiled", "persistentVolumeClaim": {"claimName": "llm-kvasir-compiled"}}
        assert volume in pod["volumes"]
        (worker,) = pod["containers"]
        assert {"name": "compiled", "mountPath": "/compiled"} in worker["volumeMounts"]
        assert worker["securityContext"]["readOnlyRootFilesystem"] is True
    assert deployed(release).worker.compile_cache_dir == "/compiled"


def test_no_other_pod_has_the_volume() -> None:
    with_it = {pod.component for pod in kept().pods() if "llm-kvasir-compiled" in str(pod.spec["volumes"])}
    assert with_it == {"worker"}


def test_an_existing_claim_is_used() -> None:
    release = kept(existingClaim="mine")
    assert not [each for each in release.of_kind("PersistentVolumeClaim") if "compiled" in str(each)]
    assert "{'claimName': 'mine'}" in str(release.of_kind("RayCluster"))


def test_another_folder_is_refused_while_the_chart_mounts_one() -> None:
    config = {"worker": {"compile_cache_dir": "/other"}}
    with pytest.raises(helm_python.HelmError, match=r"config\.worker\.compile_cache_dir"):
        render({"config": config, "compileCache": {"enabled": True}})


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policies_hold_with_the_volume(policy: Policy) -> None:
    assert list(policy(kept())) == []


@pytest.mark.parametrize("version", ["1.30"])
def test_the_objects_are_valid(version: str) -> None:
    assert list(violations(kept(), version)) == []
