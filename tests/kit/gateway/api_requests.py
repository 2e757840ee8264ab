"""Parses and authorizes requests to a Kubernetes API server, and selects objects.

The pure part of the in-test API server: paths, verbs, RBAC, selectors, merge patches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Object = dict[str, Any]

FOREGROUND = "foregroundDeletion"
"""The finalizer of an object whose dependents are deleted before it."""
REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}
_VERBS = {
    "GET": ("get", "list"),
    "POST": ("", "create"),
    "PUT": ("update", ""),
    "PATCH": ("patch", ""),
    "DELETE": ("delete", "deletecollection"),
}
"""With and without a name in the path."""
_PATH = re.compile(
    r"(?P<root>/api/v1|/apis/(?P<group>[^/]+)/v[^/]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]+))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)
_TERM = re.compile(r"\s*(!?)\s*([^\s!=,()]+)\s*(?:(==|=|!=|in\b|notin\b)\s*(\([^)]*\)|[^,()]*))?\s*(?:,|$)")


class Refused(Exception):
    """Answered with a Status."""

    def __init__(self, code: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after

    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": REASONS.get(self.code, "Unknown"),
            "code": self.code,
        }


@dataclass(frozen=True, slots=True)
class Request:
    """A request as RBAC sees it. `resource` includes its subresource, as in `pods/status`."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    collection: str
    query: Mapping[str, str]
    user: str
    body: bytes = b""

    @classmethod
    def read(cls, method: str, target: str, user: str, body: bytes) -> Request:
        """Parse a request. Raise Refused for what no API server serves."""
        parts = urlsplit(target)
        found = _PATH.fullmatch(unquote(parts.path))
        if found is None:
            raise Refused(404, "the server could not find the requested resource")
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        one, many = _VERBS.get(method, ("", ""))
        verb = one if found["name"] else many
        if not verb:
            raise Refused(405, f"{method} is not supported here")
        if verb == "list" and query.get("watch") in ("1", "true"):
            verb = "watch"
        namespace = found["namespace"] or ""
        return cls(
            verb=verb,
            group=found["group"] or "",
            resource=found["resource"] + (f"/{found['sub']}" if found["sub"] else ""),
            namespace=namespace,
            name=found["name"] or "",
            collection=found["root"]
            + (f"/namespaces/{namespace}/" if namespace else "/")
            + found["resource"],
            query=query,
            user=user,
            body=body,
        )

    def forbidden(self) -> Refused:
        """The message of the real API server."""
        whole = f"{self.resource}.{self.group}" if self.group else self.resource
        named = f' "{self.name}"' if self.name else ""
        return Refused(
            403,
            f'{whole}{named} is forbidden: User "{self.user}" cannot {self.verb} resource "{self.resource}" '
            f'in API group "{self.group}" in the namespace "{self.namespace}"',
        )

    def covers(self, collection: str) -> bool:
        """A collection without a namespace contains all namespaces."""
        return self.collection in (collection, re.sub(r"/namespaces/[^/]+/", "/", collection))

    def selects(self, value: Object) -> bool:
        """Whether an object matches the selectors. Raise Refused for a malformed one."""
        names = {"metadata.name": value["metadata"]["name"], "metadata.namespace": self.namespace}
        labels = value["metadata"].get("labels") or {}
        by_label, by_field = self.query.get("labelSelector", ""), self.query.get("fieldSelector", "")
        return matches(by_label, labels) and matches(by_field, names)


@dataclass(frozen=True, slots=True)
class Rule:
    """The permissions of a Role, from its `rules`. The namespace `*` matches all, and so do no `names`."""

    groups: tuple[str, ...]
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    namespace: str = "default"
    names: tuple[str, ...] = ()

    @classmethod
    def of_role(cls, role: Object) -> tuple[Rule, ...]:
        """The rules in the manifest of a Role, or of a ClusterRole, which apply to all namespaces."""
        namespace = role["metadata"].get("namespace", "default") if role["kind"] == "Role" else "*"
        return tuple(
            cls(
                tuple(rule["apiGroups"]),
                tuple(rule["resources"]),
                tuple(rule["verbs"]),
                namespace,
                tuple(rule.get("resourceNames", ())),
            )
            for rule in role["rules"]
        )

    def allows(self, request: Request) -> bool:
        return (
            self.namespace in ("*", request.namespace)
            and (not self.names or request.name in self.names)
            and not {"*", request.group}.isdisjoint(self.groups)
            and not {"*", request.resource}.isdisjoint(self.resources)
            and not {"*", request.verb}.isdisjoint(self.verbs)
        )


def matches(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether labels or fields match a selector (equality and sets). Raise Refused."""
    at = 0
    while at < len(selector):
        term = _TERM.match(selector, at)
        if term is None:
            raise Refused(400, f"unable to parse requirement: {selector}")
        absent, key, operator, value = term.groups()
        wanted = {each.strip() for each in (value or "").strip("() ").split(",")}
        if operator is None:
            fits = (key in labels) != bool(absent)
        else:
            fits = (labels.get(key) in wanted) == (operator in ("=", "==", "in"))
        if not fits:
            return False
        at = term.end()
    return True


def merged(before: Any, given: Any) -> Any:
    """Apply a merge patch (RFC 7386) to `before`."""
    if not isinstance(given, dict):
        return given
    made = dict(before) if isinstance(before, dict) else {}
    for name, value in given.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = merged(made.get(name), value)
    return made


def deleting(before: Object, options: bytes) -> Object | None:
    """What a DELETE with these DeleteOptions makes of an object: None if it is gone at once, and not if
    finalizers hold it, which a deletion in the foreground adds one to. Raise Refused for another UID."""
    asked = json.loads(options) if options else {}
    meta = before["metadata"]
    wanted = asked.get("preconditions", {}).get("uid", meta["uid"])
    if wanted != meta["uid"]:
        raise Refused(409, f"the UID in the precondition ({wanted}) does not match the UID in record")
    held = [*meta.get("finalizers", [])]
    if asked.get("propagationPolicy") == "Foreground" and FOREGROUND not in held:
        held.append(FOREGROUND)
    if not held:
        return None
    return {**before, "metadata": {**meta, "finalizers": held, "deletionTimestamp": "2026-01-01T00:00:00Z"}}


def released(value: Object) -> bool:
    """Whether nothing holds an object that is being deleted."""
    meta = value["metadata"]
    return "deletionTimestamp" in meta and not meta.get("finalizers")
