"""Single requests to the Kubernetes API server, for Jobs that read and change a few objects.

Blocking, one connection each, without the client library, which costs a short-lived process more than its
work.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.kubernetes.access import Access

TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 4 << 20
MERGE_PATCH = "application/merge-patch+json"


class KubernetesObjects:
    """The objects of one collection in the pod's own namespace: `api` is such as `/api/v1`, `resource` such
    as `secrets`. Every method raises ConfigError without a readable response."""

    def __init__(self, access: Access, api: str, resource: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._access = access
        self._collection = f"{api}/namespaces/{quote(access.namespace(), safe='')}/{resource}"
        self._timeout_s = timeout_s

    def get(self, name: str) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status, and the object or the Status that says why there is none."""
        return self._ask("GET", self._path(name))

    def list(self, params: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status, and one page of what `params` (labelSelector, limit) select."""
        return self._ask("GET", f"{self._collection}?{urlencode(params)}")

    def create(self, value: object) -> tuple[int, dict[str, Any]]:
        """Create an object; return the HTTP status, and the object or a Status."""
        return self._ask("POST", self._collection, value, "application/json")

    def patch(self, name: str, change: object) -> tuple[int, dict[str, Any]]:
        """Apply a merge patch (RFC 7386); return the HTTP status, and the object or a Status."""
        return self._ask("PATCH", self._path(name), change, MERGE_PATCH)

    def delete(self, name: str, options: object) -> tuple[int, dict[str, Any]]:
        """Delete with DeleteOptions; return the HTTP status, and the object or a Status."""
        return self._ask("DELETE", self._path(name), options, "application/json")

    def _path(self, name: str) -> str:
        return f"{self._collection}/{quote(name, safe='')}"

    def _ask(
        self, method: str, path: str, content: object = None, content_type: str = ""
    ) -> tuple[int, dict[str, Any]]:
        access = self._access
        try:
            connection = http.client.HTTPSConnection(
                access.host, access.port, timeout=self._timeout_s, context=access.context()
            )
            headers = {"Authorization": f"Bearer {access.token()}", "Accept": "application/json"}
            if content_type:
                headers["Content-Type"] = content_type
            try:
                connection.request(method, path, json.dumps(content) if content_type else None, headers)
                answer = connection.getresponse()
                value = json.loads(answer.read(MAX_ANSWER_BYTES))
            finally:
                connection.close()
        except (OSError, ssl.SSLError, http.client.HTTPException, ValueError) as error:
            raise ConfigError(f"the API server at {access.host}:{access.port}: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"the API server's response to {method} {path} is not an object")
        return answer.status, value
