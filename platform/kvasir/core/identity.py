"""Identity of workers, and which workers can exchange KV.

A mismatch (of KV dtype, block size, layout or tokenizer) causes no error by itself, but wrong tokens or a
cold cache. Identities are therefore compared field by field at registration, and a refusal names both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from kvasir.core.golden import GoldenPrompt, golden_conflicts
from kvasir.core.locality import NOWHERE, Locality
from kvasir.core.media.prompts import MediaKind
from kvasir.core.model.work import ModelWork
from kvasir.core.requests import Role

PROTOCOL_VERSION = 4
HASH_VERSION = 2


HEAD_MAJOR = "BHNC"
"""Axes of a block in memory with the KV heads outermost: block, head, token, contents. The part of each
tensor-parallel rank is then contiguous."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of KV in memory. Two workers exchange blocks only if their blocks are equal.

    `block_size` is in tokens, `bytes_per_block` covers all layers of one tensor-parallel rank, in every
    pipeline stage, and `kv_heads` is per rank. `layout` names the order of axes, in its last part after a
    colon if it has several.
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
        """Return each differing field as `name: mine != theirs`. Tensor-parallel sizes can differ if the
        heads of each rank are contiguous on the other side; otherwise the entry says what to do."""
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

    def of_whole_ranks(self) -> KvLayout:
        """Return the layout for ranks of which each has all of a block: one shard."""
        return replace(self, tensor_parallel_size=1)

    def _of_one_rank(self) -> KvLayout:
        """The layout with the shards of all ranks as one."""
        ranks = self.tensor_parallel_size
        return replace(
            self,
            kv_heads=self.kv_heads * ranks,
            bytes_per_block=self.bytes_per_block * ranks,
            tensor_parallel_size=1,
        )

    def _why_not_split(self, other: KvLayout) -> list[str]:
        """Return why different numbers of ranks cannot read each other's heads."""
        sizes = f"tensor_parallel_size: {self.tensor_parallel_size} != {other.tensor_parallel_size}"
        few, many = sorted((self, other), key=lambda layout: layout.tensor_parallel_size)
        if many.tensor_parallel_size % few.tensor_parallel_size:
            return [f"{sizes}, and neither divides the other; choose sizes so that one does"]
        if few.kv_heads % (many.tensor_parallel_size // few.tensor_parallel_size):
            return [
                f"{sizes}, and {few.kv_heads} KV heads of a rank cannot be split evenly; choose equal sizes"
            ]
        if self.layout == other.layout and self.layout.rpartition(":")[2] != HEAD_MAJOR:
            return [
                f"{sizes}, and KV heads are not outermost within a block (layout {self.layout}); choose "
                "equal sizes, or an attention backend that supports VLLM_KV_CACHE_LAYOUT=HND"
            ]
        return []


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of one replica. `flops` is the peak of one device for the model's data type in operations
    per second, `bytes_per_s` its peak memory bandwidth; 0 if unknown."""

    device: str = ""
    devices: int = 1
    flops: float = 0.0
    bytes_per_s: float = 0.0


NO_KV = KvLayout(block_size=1, dtype="", layout="none", layers=0, kv_heads=0, head_size=0, bytes_per_block=0)
"""The layout of a worker that exchanges no KV: one that computes embeddings."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The identity that a worker sends in its first message.

    `worker_id` is stable for one process; `epoch` grows with every start of the worker, so that state from an
    earlier process is recognized. `tokenizer_digest` is the SHA-256 of tokenizer.json and the chat template.
    `transfer` is the name of the transfer adapter, "" for none. `reports_kv`: whether it sends KvBatches and
    snapshots. `golden` is empty if the engine has no tokenizer. `model_parameters` and `model_bytes` cover
    all ranks of one replica, 0 if unknown. Workers with the same `shared_tier` (address and block properties)
    use the same remote tier; "" for none. `locality` is that of the replica's first node. `work` are the
    sizes of its model, None if unknown. `any_role`: whether its engine runs whole requests, whatever its
    role is. `images`: whether it takes requests with images; `media`: the other kinds that it takes.
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
    locality: Locality = NOWHERE
    work: ModelWork | None = None
    any_role: bool = False
    images: bool = False
    media: tuple[str, ...] = ()

    @property
    def media_kinds(self) -> frozenset[str]:
        """The kinds of media that it takes."""
        return frozenset((*self.media, MediaKind.IMAGE) if self.images else self.media)


def registration_conflicts(
    candidate: WorkerIdentity,
    *,
    model: str,
    tokenizer_digest: str,
    peers: tuple[WorkerIdentity, ...],
    golden: tuple[GoldenPrompt, ...] = (),
    embeds: bool = False,
) -> list[str]:
    """Return why `candidate` cannot join, or an empty list.

    `peers` are the workers registered for the same model. `golden` are the router's own golden prompts, which
    are compared if both sides have some. `embeds`: the model computes embeddings. Each entry has the form
    `what: candidate's != expected` and names the peer, if there is one.
    """
    found: list[str] = []
    if candidate.protocol_version != PROTOCOL_VERSION:
        found.append(f"protocol_version: {candidate.protocol_version} != {PROTOCOL_VERSION} (router)")
    if candidate.hash_version != HASH_VERSION:
        found.append(f"hash_version: {candidate.hash_version} != {HASH_VERSION} (router)")
    counts = {"kv.block_size": candidate.kv.block_size, "data_parallel_size": candidate.data_parallel_size}
    found.extend(f"{name}: {count} != at least 1 (router)" for name, count in counts.items() if count < 1)
    if candidate.model != model:
        found.append(f"model: {candidate.model} != {model} (router)")
    if candidate.tokenizer_digest != tokenizer_digest:
        found.append(
            f"tokenizer_digest: {candidate.tokenizer_digest[:16]} != {tokenizer_digest[:16]} (router)"
        )
    if (candidate.role is Role.EMBED) != embeds:
        expected = "embed" if embeds else "one that generates"
        found.append(f"role: {candidate.role} != {expected} (router)")
    if candidate.model == model and candidate.hash_version == HASH_VERSION:  # else block names differ anyway
        found.extend(golden_conflicts(candidate.golden, golden))
    others = (peer for peer in peers if peer.worker_id != candidate.worker_id)
    found.extend(next(filter(None, (_unlike(candidate, peer) for peer in others)), []))
    return found


def _unlike(candidate: WorkerIdentity, peer: WorkerIdentity) -> list[str]:
    """Return why the two cannot exchange KV, with the name of the peer."""
    differences = [f"kv.{difference}" for difference in candidate.kv.differences(peer.kv)]
    if candidate.transfer != peer.transfer:
        differences.append(f"transfer: {candidate.transfer!r} != {peer.transfer!r}")
    if candidate.revision != peer.revision:
        differences.append(f"revision: {candidate.revision} != {peer.revision}")
    return [f"{difference} ({peer.pool}/{peer.worker_id})" for difference in differences]
