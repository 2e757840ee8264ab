"""What an installation finds in its cluster: the chart looks objects up at an API server, as which this test
answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import helm_python
import pytest
from tests.helm.rendering import CHART, NAMESPACE

GROUPS = {
    "/api/v1": ("v1", [("secrets", "Secret"), ("nodes", "Node")]),
    "/apis/ray.io/v1": ("ray.io/v1", [("rayclusters", "RayCluster")]),
}
CLUSTER = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters/llm-kvasir"


@dataclass
class Api:
    """Objects by their path."""

    objects: dict[str, Any] = field(default_factory=dict)
    address: str = ""

    def answer(self, path: str) -> tuple[int, Any]:
        if path in GROUPS:
            version, kinds = GROUPS[path]
            resources = [
                {"name": name, "kind": kind, "namespaced": kind != "Node", "verbs": ["get"]}
                for name, kind in kinds
            ]
            return 200, {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        if path in self.objects:
            return 200, self.objects[path]
        return 404, {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}

    def render(self, given: dict[str, Any] | None = None) -> str:
        """All that the chart renders of these values with this API server. Raises HelmError."""
        user: dict[str, Any] = {"clusters": [{"name": "c", "cluster": {"server": self.address}}]}
        user |= {"contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}], "current-context": "c"}
        with (
            helm_python.Config(
                kubeconfig_content=json.dumps(user), namespace=NAMESPACE, storage_driver="memory"
            ) as config,
            helm_python.Chart.load(CHART) as chart,
        ):
            return "\n".join(config.render(chart, given or {}, name="llm", namespace=NAMESPACE).values())


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, value = made.answer(self.path.partition("?")[0])
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_release_is_not_put_into_a_cluster_that_is_being_deleted(api: Api) -> None:
    own = {"name": "llm-kvasir", "namespace": NAMESPACE}
    api.objects[CLUSTER] = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": own}
    assert "kind: RayCluster" in api.render()
    own["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(helm_python.HelmError) as caught:
        api.render()
    assert "the RayCluster llm-kvasir of an earlier installation is being deleted" in str(caught.value)
    assert f"kubectl -n {NAMESPACE} patch raycluster llm-kvasir --type=merge" in str(caught.value)


def test_a_release_is_put_where_there_is_none(api: Api) -> None:
    assert "kind: RayCluster" in api.render()
