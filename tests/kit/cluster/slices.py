"""EndpointSlices as the controller creates them, from a pool's name, or from a Service's manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvasir.config.spec.cluster import DEPLOYMENT_LABEL, POOL_LABEL

PORT = 7000


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod in a slice. `host`: its address; `ports`: its container ports by name."""

    name: str
    host: str
    ready: bool = True
    terminating: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)

    def endpoint(self) -> dict[str, Any]:
        return {
            "addresses": [self.host],
            "conditions": {
                "ready": self.ready and not self.terminating,
                "serving": self.ready,
                "terminating": self.terminating,
            },
            "nodeName": "node-1",
            "targetRef": {
                "kind": "Pod",
                "namespace": "default",
                "name": self.name,
                "uid": f"uid-{self.name}",
            },
        }


def endpoint_slice(
    pool: str,
    pods: Iterable[Pod],
    *,
    name: str = "",
    deployment: str = "kvasir",
    family: Literal["IPv4", "IPv6", "FQDN"] = "IPv4",
    port: int = PORT,
    port_name: str = "session",
) -> dict[str, Any]:
    """One slice of the Service of `pool`, with its labels."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name or f"{deployment}-{pool}-{family.lower()}",
            "namespace": "default",
            "labels": {
                DEPLOYMENT_LABEL: deployment,
                POOL_LABEL: pool,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": f"{deployment}-{pool}",
                "service.kubernetes.io/headless": "",
            },
        },
        "addressType": family,
        "endpoints": [pod.endpoint() for pod in pods],
        "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
    }


def slice_of_service(service: Mapping[str, Any], pods: Iterable[Pod]) -> dict[str, Any]:
    """The slice that a Service's manifest yields among `pods`: its labels, the pods that its selector
    matches, and its ports as in those pods."""
    meta, spec = service["metadata"], service["spec"]
    selector = spec["selector"].items()
    selected = [pod for pod in pods if selector <= pod.labels.items()]
    made = endpoint_slice("", selected, name=f"{meta['name']}-abcde")
    own = {"kubernetes.io/service-name": meta["name"]}
    if spec.get("clusterIP") == "None":
        own["service.kubernetes.io/headless"] = ""
    made["metadata"]["labels"] = {**meta.get("labels", {}), **own}
    ports = []
    for port in spec["ports"]:
        target = port.get("targetPort", port["port"])
        numbers = {pod.ports[target] for pod in selected if target in pod.ports}
        number = target if isinstance(target, int) else next(iter(numbers), None)
        # A named port that no pod has is omitted, and so are all ports if there is no pod.
        if selected and number is not None:
            ports.append({"name": port.get("name", ""), "port": number, "protocol": "TCP"})
    made["ports"] = ports
    return made
