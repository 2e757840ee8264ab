"""The in-test API server for clients that discover what there is before they ask for it, as Helm does.

It adds what such clients ask first (versions, groups, resources, OpenAPI), lists by their kind, and
server-side apply. What is applied has one manager: an apply replaces all that the one before had set, and
keeps the status.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import yaml
from tests.kit.cluster.api_server import ApiServer
from tests.kit.gateway.api_requests import Object, Refused, Request

VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")
APPLY = "application/apply-patch+yaml"
PLURALS = {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses", "Endpoints": "endpoints"}


class _Answered(Refused):
    """The answer to a request that is not for objects."""

    def __init__(self, value: Object) -> None:
        super().__init__(200, "")
        self._value = value

    def status(self) -> Object:
        return self._value


def plural(kind: str) -> str:
    """The name of a kind in paths."""
    return PLURALS.get(kind, f"{kind.lower()}s")


@dataclass(eq=False)
class DiscoverableServer(ApiServer):
    """`kinds` are those that it has, by their apiVersion."""

    kinds: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: Iterable[Object]) -> DiscoverableServer:
        """A server that has the kinds of these objects, and Secrets."""
        kinds: dict[str, frozenset[str]] = {"v1": frozenset({"Secret", "Endpoints"})}
        for each in objects:
            kinds[each["apiVersion"]] = kinds.get(each["apiVersion"], frozenset()) | {each["kind"]}
        return cls(kinds=kinds)

    def collection(self, value: Object) -> str:
        """Where an object is."""
        namespace, kind = value["metadata"]["namespace"], plural(value["kind"])
        return f"{_root(value['apiVersion'])}/namespaces/{namespace}/{kind}"

    def of_kind(self, kind: str) -> list[Object]:
        """All objects of a kind, by name."""
        return [
            each for (where, _), each in sorted(self._objects.items()) if where.endswith(f"/{plural(kind)}")
        ]

    def _admit(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Request:
        if (found := self._discovered(urlsplit(target).path)) is not None:
            raise _Answered(found)
        request = super()._admit(method, target, headers, body)
        if request.verb == "watch" and "sendInitialEvents" in request.query:
            raise Refused(422, "sendInitialEvents is forbidden for watch unless WatchList is enabled")
        applies = headers.get("content-type") == APPLY
        return replace(request, verb="apply") if applies else request

    def _answer(self, request: Request) -> tuple[int, Object]:
        if request.verb != "apply":
            return super()._answer(request)
        given = yaml.safe_load(request.body)
        before = self._objects.get((request.collection, request.name))
        if before is not None:
            kept = {
                key: before["metadata"][key] for key in ("uid", "finalizers") if key in before["metadata"]
            }
            given["metadata"] = {**kept, **given["metadata"]}
            if "status" in before:
                given["status"] = before["status"]
        return 200 if before else 201, self._change(request.collection, given, before is not None)

    def _list(self, request: Request) -> Object:
        found = super()._list(request)
        version = f"{request.group}/v1" if request.group else "v1"
        kinds = [kind for kind in self.kinds.get(version, ()) if plural(kind) == request.resource]
        return {**found, "kind": f"{kinds[0] if kinds else ''}List", "apiVersion": version}

    def _discovered(self, path: str) -> Object | None:
        groups = [_group(version) for version in sorted(self.kinds) if "/" in version]
        specs = {_root(each)[1:]: {"serverRelativeURL": f"/openapi/v3{_root(each)}"} for each in self.kinds}
        found: dict[str, Object] = {
            "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
            "/openapi/v3": {"paths": specs},
        }
        for version, kinds in self.kinds.items():
            found[_root(version)] = _resources(version, kinds)
            operations = dict(_operation(version, kind) for kind in kinds)
            found[f"/openapi/v3{_root(version)}"] = {"openapi": "3.0.0", "info": {}, "paths": operations}
        return found.get(path)


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _group(version: str) -> Object:
    named = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [named], "preferredVersion": named}


def _resources(version: str, kinds: Iterable[str]) -> Object:
    known = {"namespaced": True, "verbs": [*VERBS]}
    found = [{"name": plural(kind), "kind": kind, **known} for kind in sorted(kinds)]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


def _operation(version: str, kind: str) -> tuple[str, Object]:
    """What says that the server validates fields itself."""
    group, _, number = version.rpartition("/")
    operation = {
        "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
        "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
        "responses": {},
    }
    return f"{_root(version)}/namespaces/{{namespace}}/{plural(kind)}/{{name}}", {"patch": operation}


def kubeconfig(server: ApiServer, token: str) -> str:
    """What Helm and kubectl read to reach the server as the user of that token."""
    place = {
        "server": f"https://{server.host}:{server.port}",
        "certificate-authority-data": base64.b64encode(server.ca).decode(),
    }
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": place}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
    )
