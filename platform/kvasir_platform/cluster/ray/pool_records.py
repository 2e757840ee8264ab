"""What a control process leaves to the next one about the pools that go on without it.

Ray Serve restarts a pool whose version is another, so a new control process has to name the one that runs;
and the number of replicas that was asked for must not fall back to the spec's. Both stand in the key-value
store of Ray's head, which outlives the process where the head keeps its state in Redis.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvasir.config.spec.deployment import Deployment, PoolSpec

_SHARED = {"name", "model", "lora", "disaggregation", "transfer", "tiers", "worker", "tls"}
_NOT_THE_WORKERS = {"replicas", "scaling", "kv_index", "cpus", "gpus"}


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """One pool. `version` names the code and spec of its replicas, `digest` that spec; `wanted` is how many
    were asked for, and `spec_replicas` what the spec said then. `spec` is the deployment that they were
    given, in JSON. `template` is the digest of the pod template that they need, "" where any will do.
    `pinned` is the size that somebody asked for in place of the planner's.
    `before` is what they are about to replace, until they have."""

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
        """What replaces this."""
        known = max(self.version, self.before.version if self.before else 0)
        return replace(self, version=known + 1, before=replace(self, before=None), **update)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> PoolRecord:
        """Raises msgspec.DecodeError."""
        return msgspec.json.decode(raw, type=cls)


def record_key(deployment: str, pool: str) -> bytes:
    """Where a pool's record is kept."""
    return f"kvasir/{deployment}/pool/{pool}".encode()


def spec_digest(deployment: Deployment, pool: PoolSpec) -> str:
    """Of all that a worker of this pool is told by the spec: another digest needs other processes."""
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
    """How to go on with a pool: with the same version where its replicas may stay as they are, and with the
    one before where that is what is wished for again."""
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
