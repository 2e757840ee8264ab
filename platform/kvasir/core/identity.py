"""Who a worker is, and which workers may exchange KV.

A wrong pairing (another KV dtype, block size, layout or tokenizer) does not fail loudly by itself: it
gives wrong tokens or a silently cold cache. So identity is compared at registration, field by field,
and a refusal names both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from kvasir.core.golden import GoldenPrompt, golden_conflicts
from kvasir.core.requests import Role

PROTOCOL_VERSION = 4
HASH_VERSION = 2


HEAD_MAJOR = "BHNC"
"""A block's axes in memory with the KV heads outermost: block, head, token, contents. What one of more ranks
holds of a block is one piece of it then."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of KV in memory; two workers exchange blocks only if it is the same block on both sides.

    `block_size` in tokens; `bytes_per_block` over all layers of one tensor-parallel rank, and `kv_heads` of
    one rank. `layout` names the order of axes, in its last part after a colon where it has several.
    `tensor_parallel_size` is the number of shards of a block.
    """

    block_size: int
    dtype: str
    layout: str
    layers: int
    kv_heads: int
    head_size: int
    bytes_per_block: int
    tensor_parallel_size: int = 1

    def differences(self, other: KvLayout) -> list[str]:
        """Each differing field as `name: mine != theirs`. Tensor-parallel sizes may differ where each rank
        of the one side finds its heads in whole pieces on the other; where not, it is said what to do."""
        mine, theirs = self, other
        impossible: list[str] = []
        if self.tensor_parallel_size != other.tensor_parallel_size:
            mine, theirs = self._of_one_rank(), other._of_one_rank()
            impossible = self._why_not_split(other)
        differing = [
            f"{f.name}: {getattr(mine, f.name)} != {getattr(theirs, f.name)}"
            for f in fields(self)
            if getattr(mine, f.name) != getattr(theirs, f.name)
        ]
        return differing + impossible

    def _of_one_rank(self) -> KvLayout:
        """All ranks' shards as one."""
        ranks = self.tensor_parallel_size
        return replace(
            self,
            kv_heads=self.kv_heads * ranks,
            bytes_per_block=self.bytes_per_block * ranks,
            tensor_parallel_size=1,
        )

    def _why_not_split(self, other: KvLayout) -> list[str]:
        """Why ranks of different numbers cannot read each other's heads."""
        sizes = f"tensor_parallel_size: {self.tensor_parallel_size} != {other.tensor_parallel_size}"
        few, many = sorted((self, other), key=lambda layout: layout.tensor_parallel_size)
        if many.tensor_parallel_size % few.tensor_parallel_size:
            return [f"{sizes}, and neither divides the other; choose sizes of which one does"]
        if few.kv_heads % (many.tensor_parallel_size // few.tensor_parallel_size):
            return [f"{sizes}, and {few.kv_heads} KV heads of a rank cannot be split so; choose equal sizes"]
        if self.layout == other.layout and self.layout.rpartition(":")[2] != HEAD_MAJOR:
            return [
                f"{sizes}, and KV heads are not outermost within a block (layout {self.layout}); choose "
                "equal sizes, or an attention backend that knows VLLM_KV_CACHE_LAYOUT=HND"
            ]
        return []


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one replica computes on. `flops` is the peak of one device for the model's data type in
    operations per second, `bytes_per_s` its peak memory bandwidth; 0 where it is not known."""

    device: str = ""
    devices: int = 1
    flops: float = 0.0
    bytes_per_s: float = 0.0


NO_KV = KvLayout(block_size=1, dtype="", layout="none", layers=0, kv_heads=0, head_size=0, bytes_per_block=0)
"""Of a worker that offers no KV and whose cache is its own affair: one that makes embeddings."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a worker says of itself in its first message.

    `worker_id` is stable for one process; `epoch` grows with every start of that worker, so that
    state from an earlier life is recognised. `tokenizer_digest` is the SHA-256 of tokenizer.json and
    the chat template. `transfer` is the name of the transfer adapter, "" for none. `reports_kv` says
    that it sends KvBatches and answers snapshots. `golden` is empty where the engine has no tokenizer.
    `model_parameters` and `model_bytes` are for all ranks of one replica, 0 where they are not known. Workers
    with the same `shared_tier` (its address and what blocks in it must be like) read and write one remote
    tier; "" for none.
    """

    worker_id: str
    epoch: int
    pool: str
    role: Role
    model: str
    revision: str
    tokenizer_digest: str
    max_model_len: int
    kv: KvLayout
    kv_blocks: int
    engine: str
    engine_version: str
    transfer: str = ""
    adapters: tuple[str, ...] = ()
    data_parallel_size: int = 1
    protocol_version: int = PROTOCOL_VERSION
    hash_version: int = HASH_VERSION
    reports_kv: bool = False
    golden: tuple[GoldenPrompt, ...] = ()
    hardware: Hardware = Hardware()
    model_parameters: int = 0
    model_bytes: int = 0
    shared_tier: str = ""


def registration_conflicts(
    candidate: WorkerIdentity,
    *,
    model: str,
    tokenizer_digest: str,
    peers: tuple[WorkerIdentity, ...],
    golden: tuple[GoldenPrompt, ...] = (),
    embeds: bool = False,
) -> list[str]:
    """Why `candidate` may not join, or nothing.

    `peers` are the workers already registered for the same model, `golden` the router's own golden
    prompts, which are compared where both sides have some; `embeds`: the model makes embeddings. Each entry
    reads `what: candidate's != expected` and names the peer where one is the reason.
    """
    found: list[str] = []
    if candidate.protocol_version != PROTOCOL_VERSION:
        found.append(f"protocol_version: {candidate.protocol_version} != {PROTOCOL_VERSION} (router)")
    if candidate.hash_version != HASH_VERSION:
        found.append(f"hash_version: {candidate.hash_version} != {HASH_VERSION} (router)")
    if candidate.model != model:
        found.append(f"model: {candidate.model} != {model} (router)")
    if candidate.tokenizer_digest != tokenizer_digest:
        found.append(
            f"tokenizer_digest: {candidate.tokenizer_digest[:16]} != {tokenizer_digest[:16]} (router)"
        )
    if (candidate.role is Role.EMBED) != embeds:
        expected = "embed" if embeds else "one that generates"
        found.append(f"role: {candidate.role} != {expected} (router)")
    if candidate.model == model and candidate.hash_version == HASH_VERSION:  # else no name is alike
        found.extend(golden_conflicts(candidate.golden, golden))
    others = (peer for peer in peers if peer.worker_id != candidate.worker_id)
    found.extend(next(filter(None, (_unlike(candidate, peer) for peer in others)), []))
    return found


def _unlike(candidate: WorkerIdentity, peer: WorkerIdentity) -> list[str]:
    """Why the two may not exchange KV, naming the peer."""
    differences = [f"kv.{difference}" for difference in candidate.kv.differences(peer.kv)]
    if candidate.transfer != peer.transfer:
        differences.append(f"transfer: {candidate.transfer!r} != {peer.transfer!r}")
    if candidate.revision != peer.revision:
        differences.append(f"revision: {candidate.revision} != {peer.revision}")
    return [f"{difference} ({peer.pool}/{peer.worker_id})" for difference in differences]
