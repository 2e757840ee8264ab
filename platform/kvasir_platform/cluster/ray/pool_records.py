"""The state of each pool that a control process passes on to its successor.

Ray Serve restarts a pool whose version changes, so a new control process has to use the running version; and
the requested number of replicas must not revert to the spec's. Both are in the key-value store of Ray's head,
which outlives the process if the head's state is in Redis.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvasir.config.spec.deployment import Deployment, PoolSpec

_SHARED = {"name", "model", "lora", "lora_loading", "disaggregation", "transfer", "tiers", "worker", "tls"}
_NOT_THE_WORKERS = {"replicas", "scaling", "kv_index", "cpus", "gpus", "gpu"}


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """One pool. `version` identifies the code and spec of its replicas, `digest` that spec; `wanted` is the
    requested number of replicas, and `spec_replicas` the spec's at that time. `spec` is the deployment that
    the replicas were given, in JSON. `template` is the digest of the pod template that they need, "" if any
    will do. `pinned` is a size that a user requested in place of the planner's. `before` is the record of the
    replicas that they replace, until these are gone."""

    version: int
    wanted: int
    spec_replicas: int
    digest: str
    spec: str
    template: str = ""
    pinned: int | None = None
    before: PoolRecord | None = None

    @property
    def of_other_pods(self) -> bool:
        """Whether its replicas cannot run in the pods of those before."""
        return self.before is not None and self.before.template != self.template

    def follow(self, **update: Any) -> PoolRecord:
        """Return the record that replaces this one."""
        known = max(self.version, self.before.version if self.before else 0)
        return replace(self, version=known + 1, before=replace(self, before=None), **update)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> PoolRecord:
        """Raises msgspec.DecodeError."""
        return msgspec.json.decode(raw, type=cls)


def record_key(deployment: str, pool: str) -> bytes:
    """Return the key of a pool's record."""
    return f"kvasir/{deployment}/pool/{pool}".encode()


def spec_digest(deployment: Deployment, pool: PoolSpec) -> str:
    """Return the digest of everything in the spec that a worker of this pool uses: another digest needs new
    processes."""
    view = deployment.view_of(pool.name)
    shared = view.model_dump(mode="json", include=_SHARED)
    own = view.pool(pool.name).model_dump(mode="json", exclude=_NOT_THE_WORKERS)
    if deployment.partner(pool.name) is not None:
        own["does_both"] = True
    text = json.dumps([shared, own], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def resumed(
    record: PoolRecord | None, deployment: Deployment, pool: PoolSpec, template: str = ""
) -> PoolRecord:
    """Return the record to continue a pool with: the same version if its replicas may stay as they are, and
    the previous version if that is the desired one again."""
    digest = spec_digest(deployment, pool)
    if record is None:
        spec = deployment.model_dump_json()
        return PoolRecord(1, pool.replicas, pool.replicas, digest, spec, template)
    if (record.digest, record.template) != (digest, template):
        before = record.before
        if before is not None and (before.digest, before.template) == (digest, template):
            left = replace(record, before=None)
            record = replace(before, wanted=left.wanted, spec_replicas=left.spec_replicas, before=left)
        else:
            record = record.follow(digest=digest, spec=deployment.model_dump_json(), template=template)
    if record.spec_replicas != pool.replicas:
        record = replace(record, wanted=pool.replicas, spec_replicas=pool.replicas)
    return record
