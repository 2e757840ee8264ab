"""Which pod template the pods of a pool have been made of, and which one is wished for.

KubeRay gives a changed template to the pods that it makes, and leaves those that run. So every pod says by
one of its resources in Ray which template it is of: a replica asks for that of its own, and pods of another
one are known. Pure.
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
_GROUP = "_group_"


class PodTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is wished for the pods of one pool: the digest of their template, and how many there may be."""

    template: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{8,64}\Z")]
    pods: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class PodRow:
    """One living pod of a pool, by the name that Ray has for it. `template` is "" where it says none; a pod
    is `free` when nothing runs in it."""

    node_id: str
    pool: str
    template: str
    free: bool


def pool_resource(pool: str) -> str:
    """What a pod of a pool brings one of, and each of its replicas takes: one replica for each pod, and a
    pod of its own pool."""
    return f"{_POOL}{pool}"


def follower_resource(pool: str) -> str:
    """The same of the pods that carry the further nodes of a pool's engines."""
    return f"{_FOLLOWER}{pool}"


def template_resource(template: str) -> str:
    """The same of the pods of one template, whichever of the two they are."""
    return f"{_TEMPLATE}{template}"


def pod_templates(raw: bytes) -> dict[str, PodTemplate]:
    """What is wished, by pool, from its JSON. Raises ConfigError."""
    try:
        return msgspec.json.decode(raw, type=dict[str, PodTemplate])
    except msgspec.DecodeError as error:
        raise ConfigError(f"the wished pods of pools are not as the chart writes them: {error}") from None


def pods_of(nodes: Iterable[Mapping[str, Any]], available: Mapping[str, Mapping[str, float]]) -> list[PodRow]:
    """The living pods of pools among the nodes that Ray lists. `available`: what Ray has left of each node's
    resources, by the node's name."""
    found = []
    for node in nodes:
        # What is reserved for an engine on several nodes Ray lists again, under the name of its group.
        names = [each for each in node["Resources"] if _GROUP not in each] if node["Alive"] else []
        place = next((name for name in names if name.startswith((_POOL, _FOLLOWER))), None)
        if place is not None:
            node_id = str(node["NodeID"])
            pool = place.removeprefix(_POOL).removeprefix(_FOLLOWER)
            of = next((name.removeprefix(_TEMPLATE) for name in names if name.startswith(_TEMPLATE)), "")
            found.append(PodRow(node_id, pool, of, available.get(node_id, {}).get(place, 0) >= 1))
    return found
