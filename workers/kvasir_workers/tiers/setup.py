"""The tiers of one engine, made from the deployment spec.

The only place that knows which adapters there are. An engine loads the client libraries of those that it has.
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
    """Of one block over all layers and tensor-parallel ranks."""
    return layout.bytes_per_block * layout.tensor_parallel_size


def open_store(
    spec: TiersSpec, layout: KvLayout, mark: bytes, now: Callable[[], float]
) -> tuple[TierStore, SharedMemory]:
    """The store and the memory of its arena. Blocks of another `mark` are never read.

    Raises ConfigError when the memory cannot be had, or holds too few blocks to be of use."""
    size = block_bytes(layout)
    if size % LANE_BYTES:
        raise ConfigError(f"tiers: blocks of {size} B, and only multiples of {LANE_BYTES} can be kept")
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
    """What KV must have in common to be exchanged through a tier: the model's name, revision and weights, the
    layout, and the weights of the adapters by name."""
    weights = [
        _weights_digest(folder),
        *(f"{at}={_weights_digest(Path(adapters[at]))}" for at in sorted(adapters)),
    ]
    return fingerprint(name, f"{revision} {' '.join(weights)}", layout)


def shared_tier(spec: RedisTierSpec | None, mark: bytes) -> str:
    """For WorkerIdentity.shared_tier: equal where workers find each other's blocks, and "" without a shared
    tier. Holds no secret."""
    if spec is None:
        return ""
    where = f"{spec.url} {spec.namespace} {mark.hex()}"
    return blake2b(where.encode(), digest_size=16).hexdigest()


def _weights_digest(folder: Path) -> str:
    """Of names, sizes and samples of a model's files: what tells one set of weights from another without
    reading all of it. Training moves nearly every weight, and samples from end to end meet some of them.
    Where the folder is does not matter."""
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
