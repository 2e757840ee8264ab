"""The part of the deployment spec for KV tiers below the device."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Name, Spec
from kvasir.config.spec.redis import RedisServerSpec


class CpuTierSpec(Spec):
    """Host memory of each engine. Ranks on one node share it, and lower tiers are written from and read into
    it; ranks on several nodes keep their parts of a block each in their node's memory."""

    bytes: int = Field(default=1 << 30, ge=1 << 20, le=64 << 40)
    """Memory of each engine, that is of each data-parallel rank of a replica, over all of its nodes."""
    eviction: Literal["lfu", "lru", "s3fifo"] = "lfu"
    """Eviction policy."""


class DiskTierSpec(Spec):
    """Files on a disk of the worker's node. They persist and serve the next worker on the node."""

    path: str = Field(min_length=1)
    """Folder, created with access for its owner only if it does not exist. Each engine uses a subfolder of
    its own."""
    bytes: int = Field(default=10 << 30, ge=1 << 20, le=1 << 50)
    """Maximum disk space of each engine."""
    lookup_timeout_s: float = Field(default=0.008, gt=0, le=10)
    """A lookup that waits longer for reads and writes in progress is a miss."""
    timeout_s: float = Field(default=1.0, gt=0, le=60)
    """A read that takes longer is a miss."""

    @model_validator(mode="after")
    def _looked_up_before_read(self) -> Self:
        _check_order(self.lookup_timeout_s, self.timeout_s)
        return self


class RedisTierSpec(RedisServerSpec):
    """A Redis server that all workers share."""

    namespace: Name = "kvasir"
    """Prefix of keys. Deployments that share a Redis server can use the same one: the model and the layout
    are part of the key."""
    ttl_s: int = Field(default=3600, ge=1, le=30 * 86_400)
    """How long a block is kept after its last use."""
    max_value_bytes: int = Field(default=64 << 20, ge=1 << 10, le=512 << 20)
    """Maximum size of a stored block."""
    connections: int = Field(default=2, ge=1, le=64)
    """Connections of each engine."""
    lookup_timeout_s: float = Field(default=0.008, gt=0, le=10)
    """A lookup that takes longer is a miss."""
    timeout_s: float = Field(default=0.5, gt=0, le=60)
    """A read or write that takes longer fails."""

    @model_validator(mode="after")
    def _looked_up_before_read(self) -> Self:
        _check_order(self.lookup_timeout_s, self.timeout_s)
        return self


class TiersSpec(Spec):
    """KV tiers below the device. A tier is used if it is set; by default none is."""

    cpu: CpuTierSpec | None = None
    disk: DiskTierSpec | None = None
    redis: RedisTierSpec | None = None
    write_back: Literal["prompts", "all"] = "all"
    """Blocks to store: those of prompts only, or also those of generated tokens."""
    write_back_bytes: int = Field(default=128 << 20, ge=1 << 20, le=64 << 30)
    """Maximum bytes queued for writing to each of disk and Redis. Blocks beyond it are not written."""
    prefetch: bool = True
    """Fetch the blocks that the router expects in a tier as soon as a request arrives, while it is queued."""

    @property
    def configured(self) -> bool:
        """Whether any tier is set."""
        return self.cpu is not None or self.disk is not None or self.redis is not None

    @property
    def memory(self) -> CpuTierSpec:
        """The memory through which lower tiers are read and written: the CPU tier, or one of default size."""
        return self.cpu or CpuTierSpec()


def _check_order(lookup_timeout_s: float, timeout_s: float) -> None:
    if lookup_timeout_s > timeout_s:
        raise ValueError(f"lookup_timeout_s {lookup_timeout_s:g} exceeds timeout_s {timeout_s:g}; lower it")
