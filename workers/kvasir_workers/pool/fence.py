"""Which replicas may serve side by side during an upgrade.

A rolling restart ends an old replica as soon as Ray reports its successor as up, but routers may reject the
successor. So a replica compares itself with the first one of this run before it reports that it is up. A
replica that does not fit fails its start; the restart stops there, and the old ones keep serving.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from kvasir.config.spec.deployment import Deployment
from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.membership import NAMESPACE

_KV = "kv."


def fence_of(identity: WorkerIdentity) -> dict[str, Any]:
    """Return the values that must be equal in all replicas of one run that serve one model."""
    kv = {f"{_KV}{name}": value for name, value in asdict(identity.kv).items()}
    return {
        "protocol_version": identity.protocol_version,
        "hash_version": identity.hash_version,
        "model": identity.model,
        "revision": identity.revision,
        "tokenizer_digest": identity.tokenizer_digest,
        "transfer": identity.transfer,
        **kv,
    }


def fence_conflicts(mine: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """Return each difference as `name: mine != first's`. Layouts of KV may differ where one reads the other's
    blocks."""
    names = [*first, *(name for name in mine if name not in first)]
    here, there = _layout(mine), _layout(first)
    found: list[str] = []
    if here is not None and there is not None:
        found = [f"{_KV}{difference}" for difference in here.differences(there)]
        names = [name for name in names if not name.startswith(_KV)]
    return found + [
        f"{name}: {mine.get(name)} != {first.get(name)}"
        for name in names
        if mine.get(name) != first.get(name)
    ]


def _layout(values: dict[str, Any]) -> KvLayout | None:
    """Return the layout in the values of a replica, None if another version wrote them."""
    kv = {name.removeprefix(_KV): value for name, value in values.items() if name.startswith(_KV)}
    return KvLayout(**kv) if kv.keys() == {field.name for field in fields(KvLayout)} else None


def fence_name(deployment: Deployment, pool: str) -> str:
    """Return the name under which the replicas of `pool` are compared; pools of one model share it."""
    of_model = [pool in {each.name for each in view.pools} for view in deployment.views()]
    place = of_model.index(True)
    return f"kvasir/{deployment.name}/fence" + (f"-{place}" if place else "")


def claim_fence(name: str, identity: WorkerIdentity) -> list[str]:
    """Compare with the first replica of this run, or become it. Return the conflicts. Blocks on Ray's
    key-value store, which lives as long as the head's state."""
    key, mine = name.encode(), fence_of(identity)
    _internal_kv_put(key, json.dumps(mine).encode(), overwrite=False, namespace=NAMESPACE)
    first = _internal_kv_get(key, namespace=NAMESPACE)
    return fence_conflicts(json.loads(json.dumps(mine)), json.loads(first)) if first else []
