"""The chart as Helm's own engine renders it, in the shapes that tests look at.

python -m tests.helm.rendering    # write golden.yaml
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kvasir"
GOLDEN = Path(__file__).resolve().parent / "golden.yaml"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "llm", "serving"
_OF_CONTAINER = (
    "image",
    "imagePullPolicy",
    "command",
    "args",
    "env",
    "resources",
    "securityContext",
    "volumeMounts",
)
_TEMPLATES = ("Deployment", "StatefulSet", "Job")


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that the release makes, by itself or through what it makes. `of` is that object."""

    of: str
    labels: dict[str, str]
    spec: Object

    @property
    def component(self) -> str:
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


@dataclass(slots=True)
class Release:
    """All objects of one rendering."""

    objects: list[Object] = field(default_factory=list)

    def of_kind(self, *kinds: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] in kinds]

    def one(self, kind: str, name: str) -> Object:
        (found,) = (each for each in self.of_kind(kind) if each["metadata"]["name"] == name)
        return found

    def pods(self) -> list[Pod]:
        return [pod for each in self.objects for pod in _pods(each)]


def values(path: Path) -> Object:
    """A file of values as Helm reads it."""
    return helm_python.values_from_yaml(path.read_text(encoding="utf-8"))


def render(given: Object | None = None, *, name: str = RELEASE) -> Release:
    """All objects that the chart makes of these values, for the caller to change. Equal values are rendered
    once. Raises HelmValuesError for values that the schema refuses, and HelmRenderError for those that the
    chart refuses."""
    release: Release = pickle.loads(_rendered(json.dumps(given or {}), name))
    return release


def render_anew(given: Object | None = None, *, name: str = RELEASE) -> Release:
    """The same, rendered by this call."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(given or {})
        files = chart.render(given or {}, name=name, namespace=NAMESPACE)
    found = Release()
    for path, text in sorted(files.items()):
        if path.endswith(".yaml"):
            found.objects += [each for each in loaded(text) if each is not None]
    return found


@cache
def _rendered(given: str, name: str) -> bytes:
    return pickle.dumps(render_anew(json.loads(given), name=name))


def loaded(text: str) -> list[Any]:
    """The documents of a text of YAML, by libyaml's parser, which takes a tenth of the time."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def example(name: str) -> Release:
    """An example's objects, for the caller to change."""
    return render(values(CHART / "examples" / f"{name}.yaml"))


def everything() -> Release:
    """Values that switch on what no example does, so that every template makes something."""
    return render(
        {
            "config": {
                "disaggregation": "never",
                "pools": [{"name": "wide", "role": "both", "gpus": 8, "engine": {"tensor_parallel_size": 8}}],
                "gateway": {"port": 8443},
                "regions": {"name": "eu", "peers": [{"name": "us", "address": "cells.us.example:7443"}]},
            },
            "pools": {"wide": {"rdma": {"resource": "rdma/hca", "lockMemory": True}}},
            "router": {
                "tls": {"secretName": "gateway"},
                "autoscaling": {"enabled": True},
                "console": {"enabled": True},
                "cells": {"enabled": True, "to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]},
            },
            "certificates": {"from": "certManager"},
            "redis": {"tier": True, "persistence": {"enabled": True, "storageClass": "fast"}},
            "modelCache": {"enabled": True, "tokenSecret": "token"},
            "compileCache": {"enabled": True},
            "ingress": {"enabled": True, "hosts": ["a.example.com"]},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
            "inferencePool": {"enabled": True, "picker": {"tls": {"secretName": "picker"}}},
            "monitoring": {
                "serviceMonitor": {"enabled": True},
                "rules": {"enabled": True},
                "dashboards": {"enabled": True},
            },
            "commonLabels": {"team": "models"},
            "test": {"caSecret": "authority", "verify": True},
        }
    )


def without_chance(release: Release) -> Release:
    """The same with what is random named, so that two renderings can be compared."""
    found: Release = pickle.loads(pickle.dumps(release))
    for secret in found.of_kind("Secret"):
        for key in secret.get("data", {}):
            secret["data"][key] = "<made at the first installation>"
    return found


def dashboards(release: Release) -> list[Object]:
    """The ConfigMaps of dashboards."""
    label = "app.kubernetes.io/component"
    return [
        each for each in release.of_kind("ConfigMap") if each["metadata"]["labels"].get(label) == "dashboards"
    ]


def golden_text() -> str:
    """What golden.yaml should hold: all objects of a release in which every template makes something."""
    release = without_chance(everything())
    for dashboard in dashboards(release):
        dashboard["data"] = dict.fromkeys(dashboard["data"], "<a file of the chart>")
    text: str = yaml.dump_all(
        release.objects, Dumper=yaml.CSafeDumper, sort_keys=True, width=110, allow_unicode=True
    )
    return text


def spec_text(release: Release) -> str:
    """The deployment spec that processes read."""
    (found,) = (each for each in release.of_kind("ConfigMap") if "pods.json" in each["data"])
    text: str = found["data"]["kvasir.yaml"]
    return text


def _pods(made: Object) -> Iterator[Pod]:
    of = f"{made['kind']}/{made['metadata']['name']}"
    if made["kind"] == "Pod":
        yield Pod(of, made["metadata"]["labels"], made["spec"])
    elif made["kind"] in _TEMPLATES:
        yield _of_template(of, made["spec"]["template"])
    elif made["kind"] == "CronJob":
        yield _of_template(of, made["spec"]["jobTemplate"]["spec"]["template"])
    elif made["kind"] == "RayCluster":
        head = _of_template(f"{of} head", made["spec"]["headGroupSpec"]["template"])
        if made["spec"]["enableInTreeAutoscaling"]:
            # KubeRay adds this container.
            options = made["spec"]["autoscalerOptions"]
            sidecar = {key: value for key, value in options.items() if key in _OF_CONTAINER}
            head.spec["containers"] = [*head.spec["containers"], {"name": "autoscaler", **sidecar}]
        yield head
        for group in made["spec"]["workerGroupSpecs"]:
            yield _of_template(f"{of} {group['groupName']}", group["template"])


def _of_template(of: str, template: Object) -> Pod:
    return Pod(of, template["metadata"]["labels"], dict(template["spec"]))


if __name__ == "__main__":
    GOLDEN.write_text(golden_text(), encoding="utf-8")
