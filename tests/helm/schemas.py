"""Validation of objects against the schemas of Kubernetes and of the custom resources that the chart makes.

Strict: a field that no schema knows is a mistake, where an API server would only drop it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
from tests.helm.rendering import Object, Release

CRDS = Path(__file__).resolve().parent / "crds"
VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
# The library reads the schemas of a version, megabytes of JSON, for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


def violations(release: Release, version: str) -> Iterator[str]:
    """What is wrong with each object in a cluster of that version of Kubernetes, those of custom resources
    included, and with the pods that KubeRay makes."""
    for each in release.objects:
        what = f"{each['kind']}/{each['metadata']['name']}"
        schema = _custom(each["apiVersion"], each["kind"])
        if schema is None:
            yield from _builtin(what, each, version)
            continue
        for error in jsonschema.Draft202012Validator(schema).iter_errors(each):
            yield f"{what}: {error.json_path}: {error.message}"
    for pod in release.pods():
        if pod.of.startswith("RayCluster/"):
            made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "made"}, "spec": pod.spec}
            yield from _builtin(pod.of, made, version)


def _builtin(what: str, value: Object, version: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(value, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{what}: {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        yield f"{what}: {error.message}"


@cache
def _custom(api_version: str, kind: str) -> Any:
    group, _, version = api_version.rpartition("/")
    for path in CRDS.glob(f"{group}_*.json"):
        spec = json.loads(path.read_text(encoding="utf-8"))["spec"]
        if spec["names"]["kind"] == kind:
            (found,) = (each for each in spec["versions"] if each["name"] == version)
            return _strict(found["schema"]["openAPIV3Schema"], top=True)
    return None


def _strict(schema: Any, *, top: bool = False) -> Any:
    """The schema, refusing fields that it does not list."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: _strict(each) for name, each in value.items()} if key == "properties" else _strict(value)
        for key, value in schema.items()
        if key != "format"
    }
    loose = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not loose and not schema.get("x-kubernetes-embedded-resource"):
        made["additionalProperties"] = False
    if top:
        # The API server's own, which definitions do not spell out.
        made["properties"] |= {"metadata": {"type": "object"}, "apiVersion": {}, "kind": {}}
    return made
