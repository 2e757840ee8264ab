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


def block_bytes(layout: KvLayout) -> int:
    """Return the bytes of one block over all layers and tensor-parallel ranks."""
    return layout.bytes_per_block * layout.tensor_parallel_size


def open_store(
    spec: TiersSpec, layout: KvLayout, mark: bytes, now: Callable[[], float]
) -> tuple[TierStore, SharedMemory]:
    """Return the store and the memory of its arena. Blocks of another `mark` are never read.

    Raise ConfigError if the memory cannot be allocated, or holds too few blocks.
    """
    size = block_bytes(layout)
    if size % LANE_BYTES:
        raise ConfigError(f"tiers: blocks have {size} B, which is not a multiple of {LANE_BYTES}")
    slots = spec.memory.bytes // size
    if slots < 4:
        raise ConfigError(f"tiers.cpu.bytes: {spec.memory.bytes} holds {slots} blocks of {size} B; raise it")
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
    arena = Arena(slots, eviction(spec.memory.eviction, slots))
    return TierStore(arena, memory.slot_view, size, lower, now), memory


def mark_of(name: str, revision: str, layout: KvLayout, folder: Path, adapters: Mapping[str, str]) -> bytes:
    """Return the mark that KV must share to be exchanged through a tier: the model's name, revision and
    weights, the layout, and the weights of the adapters by name."""
    weights = [
        _weights_digest(folder),
        *(f"{at}={_weights_digest(Path(adapters[at]))}" for at in sorted(adapters)),
    ]
    return fingerprint(name, f"{revision} {' '.join(weights)}", layout)


def shared_tier(spec: RedisTierSpec | None, mark: bytes) -> str:
    """Return WorkerIdentity.shared_tier: equal for workers that find each other's blocks, "" without a shared
    tier. Contains no secret."""
    if spec is None:
        return ""
    where = f"{spec.url} {spec.namespace} {mark.hex()}"
    return blake2b(where.encode(), digest_size=16).hexdigest()


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
