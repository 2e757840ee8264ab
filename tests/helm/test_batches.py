"""A volume for files and batches in the chart, which routers write and no other pod has."""

from __future__ import annotations

import helm_python
import pytest
from tests.helm.rendering import Release, render, spec_text

import kvasir.config.load.loader as spec


def kept(**batches: object) -> Release:
    return render({"batches": {"enabled": True, **batches}})


def test_by_default_there_is_no_volume() -> None:
    assert spec.loads(spec_text(render()), "kvasir.yaml").gateway.batches.storage is None
    assert not [each for each in render().of_kind("PersistentVolumeClaim") if "batches" in str(each)]


def test_routers_write_to_the_claim_and_no_other_pod_has_it() -> None:
    release = kept(size="50Gi", storageClass="shared")
    claim = release.one("PersistentVolumeClaim", "llm-kvasir-batches")["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("shared", "50Gi")
    pods = {pod.component: pod for pod in release.pods() if "llm-kvasir-batches" in str(pod.spec["volumes"])}
    assert set(pods) == {"router"}
    (router,) = pods["router"].spec["containers"]
    assert {"name": "batches", "mountPath": "/batches"} in router["volumeMounts"]
    assert spec.loads(spec_text(release), "kvasir.yaml").gateway.batches.storage == "/batches"


def test_an_existing_claim_is_used() -> None:
    release = kept(existingClaim="mine")
    assert not [each for each in release.of_kind("PersistentVolumeClaim") if "batches" in str(each)]
    assert "{'claimName': 'mine'}" in str(release.of_kind("Deployment"))


def test_another_folder_is_refused_while_the_chart_mounts_one() -> None:
    config = {"gateway": {"batches": {"storage": "/other"}}}
    with pytest.raises(helm_python.HelmError, match=r"config\.gateway\.batches\.storage"):
        render({"batches": {"enabled": True}, "config": config})


def in_s3(**values: object) -> Release:
    return render({"config": {"gateway": {"batches": {"storage": "s3://bucket/batches"}}}, **values})


REACHED = {"router": {"egress": [{"ports": [{"port": 443}]}]}}


def test_object_storage_needs_no_volume() -> None:
    release = in_s3(networkPolicy=REACHED)
    assert spec.loads(spec_text(release), "kvasir.yaml").gateway.batches.in_objects
    assert not [each for each in release.of_kind("PersistentVolumeClaim") if "batches" in str(each)]
    assert "AWS_" not in str(release.of_kind("Deployment"))


def test_only_routers_get_the_credentials_of_object_storage() -> None:
    release = in_s3(networkPolicy=REACHED, batches={"s3": {"credentialsSecret": "bucket-key"}})
    holders = {pod.component for pod in release.pods() if "bucket-key" in str(pod.spec)}
    assert holders == {"router"}
    (router,) = next(pod for pod in release.pods() if pod.component == "router").spec["containers"]
    found = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in router["env"] if "AWS_" in str(each)}
    assert {name: (of["name"], of["key"], of.get("optional", False)) for name, of in found.items()} == {
        "AWS_ACCESS_KEY_ID": ("bucket-key", "AWS_ACCESS_KEY_ID", False),
        "AWS_SECRET_ACCESS_KEY": ("bucket-key", "AWS_SECRET_ACCESS_KEY", False),
        "AWS_SESSION_TOKEN": ("bucket-key", "AWS_SESSION_TOKEN", True),
    }


def test_object_storage_that_no_router_may_reach_is_refused() -> None:
    with pytest.raises(helm_python.HelmError, match=r"networkPolicy\.router\.egress"):
        in_s3()


def test_credentials_without_object_storage_are_refused() -> None:
    with pytest.raises(helm_python.HelmError, match=r"batches\.s3\.credentialsSecret"):
        kept(s3={"credentialsSecret": "bucket-key"})
