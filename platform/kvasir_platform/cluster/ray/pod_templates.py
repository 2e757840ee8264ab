"""The pod template that each pod of a pool was made from, and the desired one.

KubeRay uses a changed template for pods that it creates, and leaves running pods unchanged. So each pod names
its template by one of its resources in Ray: a replica requests that resource of its own template, and pods of
other templates are known. Another resource is the revision of the release: KubeRay may create pods of the
next template before the control process reads of it. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from kvasir.core.errors import ConfigError

_POOL = "kvasir-pool-"
_FOLLOWER = "kvasir-follower-"
_TEMPLATE = "kvasir-template-"
REVISION = "kvasir-revision"
"""The resource of which a pod has as many as the number of the release's revision that created it."""
_GROUP = "_group_"


class PodTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The desired pods of one pool: the digest of their template, and their maximum number."""

    template: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{8,64}\Z")]
    pods: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class PodRow:
    """One living pod of a pool, by Ray's name for it. `template` is "" and `revision` 0 if it names none; a
    pod is `free` when nothing runs in it."""

    node_id: str
    pool: str
    template: str
    free: bool
    revision: int = 0


def pool_resource(pool: str) -> str:
    """Return the resource of which a pod of a pool has one and each of its replicas takes one: one replica
    for each pod, in a pod of its own pool."""
    return f"{_POOL}{pool}"


def follower_resource(pool: str) -> str:
    """Return the same for pods of further nodes of a pool's engines."""
    return f"{_FOLLOWER}{pool}"


def template_resource(template: str) -> str:
    """Return the same for pods of one template, of either kind."""
    return f"{_TEMPLATE}{template}"


def pod_templates(raw: bytes) -> dict[str, PodTemplate]:
    """Parse the desired pods, by pool, from JSON. Raises ConfigError."""
    try:
        return msgspec.json.decode(raw, type=dict[str, PodTemplate])
    except msgspec.DecodeError as error:
        raise ConfigError(f"the desired pods of pools are not in the chart's format: {error}") from None


def pods_of(nodes: Iterable[Mapping[str, Any]], available: Mapping[str, Mapping[str, float]]) -> list[PodRow]:
    """Return the living pods of pools among the nodes that Ray lists. `available`: each node's free
    resources, by the node's name."""
    found = []
    for node in nodes:
        # Ray lists resources reserved for an engine on several nodes under the name of its group.
        names = [each for each in node["Resources"] if _GROUP not in each] if node["Alive"] else []
        place = next((name for name in names if name.startswith((_POOL, _FOLLOWER))), None)
        if place is not None:
            node_id = str(node["NodeID"])
            pool = place.removeprefix(_POOL).removeprefix(_FOLLOWER)
            of = next((name.removeprefix(_TEMPLATE) for name in names if name.startswith(_TEMPLATE)), "")
            free = available.get(node_id, {}).get(place, 0) >= 1
            found.append(PodRow(node_id, pool, of, free, int(node["Resources"].get(REVISION, 0))))
    return found
