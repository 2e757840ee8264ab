"""One simulated replica: its performance model, memory, and the links of its KV."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.requests import Role
from kvasir.performance.step import EngineModel
from kvasir_platform.sim.engine.options import BatchOptions

SIM_MODEL = "simulated"


@dataclass(frozen=True, slots=True)
class ReplicaLinks:
    """Seconds: `cpu_byte_s` per byte to or from CPU memory, `fixed_s` and `byte_s` of a transfer from another
    worker, of all ranks together."""

    cpu_byte_s: float = 1 / 25e9
    fixed_s: float = 0.003
    byte_s: float = 1 / 10e9


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """KV memory of a replica in blocks of `block_tokens`: on its devices, and in CPU memory below them."""

    blocks: int
    cpu_blocks: int = 0
    block_tokens: int = 64


@dataclass(frozen=True, slots=True)
class EngineReplica:
    """All that makes the replicas of a pool alike. `weight_bytes` are those of all ranks together."""

    model: EngineModel
    memory: ReplicaMemory
    options: BatchOptions = BatchOptions()
    links: ReplicaLinks = field(default_factory=ReplicaLinks)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of KV of one token, of all ranks together."""
        return self.model.kv_token_bytes()

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights, of all ranks together."""
        return self.model.work.parameters * self.model.weight_bytes

    def identity(self, worker_id: str, pool: str, role: Role) -> WorkerIdentity:
        """Return what such a worker reports of itself."""
        model, block = self.model, self.memory.block_tokens
        shards = model.shape.ranks
        layout = KvLayout(
            block_size=block,
            dtype=model.compute_dtype,
            layout="layers,blocks,kv_heads,tokens,head",
            layers=model.work.layers,
            kv_heads=1,
            head_size=1,
            bytes_per_block=max(1, round(self.kv_token_bytes * block / shards)),
            tensor_parallel_size=shards,
        )
        device = model.device
        return WorkerIdentity(
            worker_id=worker_id,
            epoch=1,
            pool=pool,
            role=role,
            model=SIM_MODEL,
            revision="",
            tokenizer_digest="",
            max_model_len=self.memory.blocks * block,
            kv=layout,
            kv_blocks=self.memory.blocks,
            engine="simulated",
            engine_version="1",
            transfer="simulated",
            reports_kv=True,
            hardware=Hardware(device.name, shards, device.peak(model.compute_dtype), device.bytes_per_s),
            model_parameters=round(model.work.parameters),
            model_bytes=round(self.weight_bytes),
        )
