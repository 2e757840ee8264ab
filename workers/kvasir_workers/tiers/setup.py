"""The tiers of one engine, created from the deployment spec.

The only module that selects adapters. An engine imports the client libraries of its own tiers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

from kvasir.config.spec.tiers import RedisTierSpec, TiersSpec
from kvasir.core.errors import ConfigError
from kvasir.core.identity import KvLayout
from kvasir_workers.tiers.arena import Arena
from kvasir_workers.tiers.blob import LANE_BYTES, fingerprint
from kvasir_workers.tiers.eviction import eviction
from kvasir_workers.tiers.levels import LowerTierSettings
from kvasir_workers.tiers.memory import SharedMemory
from kvasir_workers.tiers.store import TierStore

_HEAD_BYTES = 64 << 10
_SAMPLES = 64
_SAMPLE_BYTES = 4 << 10
_WEIGHTS = ("*.json", "*.safetensors", "*.bin", "*.gguf", "*.pt")


def open_store(
    spec: TiersSpec, layout: KvLayout, mark: bytes, now: Callable[[], float], *, together: bool = True
) -> tuple[TierStore, SharedMemory | None]:
    """Return the store and the memory of its arena, for blocks of a `layout` over all layers; each slot has
    the parts of all tensor-parallel ranks. Blocks of another `mark` are never read. Without `together` the
    ranks keep their parts of a slot in memory of their own, and there is none here.

    Raise ConfigError if the memory cannot be allocated, or holds too few blocks, or if there are lower tiers
    of ranks that are not together.
    """
    size = layout.bytes_per_block * layout.tensor_parallel_size
    if size % LANE_BYTES:
        raise ConfigError(f"tiers: blocks have {size} B, which is not a multiple of {LANE_BYTES}")
    slots = spec.memory.bytes // size
    if slots < 4:
        raise ConfigError(f"tiers.cpu.bytes: {spec.memory.bytes} holds {slots} blocks of {size} B; raise it")
    arena = Arena(slots, eviction(spec.memory.eviction, slots))
    if not together:
        if spec.disk is not None or spec.redis is not None:
            raise ConfigError("tiers: disk and redis need all ranks on one node; set engine.nodes: 1")
        return TierStore(arena, _no_view, size, (), now), None
    memory = SharedMemory.create(slots, size)
    lower = []
    if spec.disk is not None:
        from kvasir_workers.tiers.blobs.disk import DiskTier

        disk = DiskTier(spec.disk, mark, size, now=now)
        lower.append(
            LowerTierSettings(disk, spec.disk.lookup_timeout_s, spec.disk.timeout_s, spec.write_back_bytes)
        )
    if spec.redis is not None:
        from kvasir_workers.tiers.blobs.redis_tier import RedisTier

        remote = RedisTier(spec.redis, mark, size, now=now)
        lower.append(
            LowerTierSettings(
                remote, spec.redis.lookup_timeout_s, spec.redis.timeout_s, spec.write_back_bytes
            )
        )
    return TierStore(arena, memory.slot_view, size, lower, now), memory


def mark_of(
    name: str,
    revision: str,
    layout: KvLayout,
    folder: Path,
    adapters: Mapping[str, str],
    *,
    stages: int = 1,
) -> bytes:
    """Return the mark that KV must share to be exchanged through a tier: the model's name, revision and
    weights, the layout over all layers, the number of pipeline stages, and the weights of the adapters by
    name."""
    weights = [
        _weights_digest(folder),
        *(f"{at}={_weights_digest(Path(adapters[at]))}" for at in sorted(adapters)),
    ]
    divided = f" {stages} stages" if stages > 1 else ""
    return fingerprint(name, f"{revision} {' '.join(weights)}{divided}", layout)


def shared_tier(spec: RedisTierSpec | None, mark: bytes) -> str:
    """Return WorkerIdentity.shared_tier: equal for workers that find each other's blocks, "" without a shared
    tier. Contains no secret."""
    if spec is None:
        return ""
    where = f"{spec.url} {spec.namespace} {mark.hex()}"
    return blake2b(where.encode(), digest_size=16).hexdigest()


def _no_view(slot: int) -> memoryview:
    raise ValueError(f"slot {slot} is in the memory of ranks on several nodes")


def _weights_digest(folder: Path) -> str:
    """Return a digest of names, sizes and samples of a model's files, which distinguishes weights without
    reading all of them. Training changes nearly every weight, and the samples are spread over each file. The
    folder's path is not included."""
    digest = blake2b(digest_size=16)
    for path in sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for at in range(1, _SAMPLES + 1):
                file.seek(max(0, size * at // _SAMPLES - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
