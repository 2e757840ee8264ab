"""The deployment spec's part about tiers: where KV stays when the device has no room for it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Name, Spec
from kvasir.config.spec.redis import RedisServerSpec


class CpuTierSpec(Spec):
    """Host memory of each engine, shared by its ranks. Lower tiers are written from it and read into it."""

    bytes: int = Field(default=1 << 30, ge=1 << 20, le=64 << 40)
    """Memory of each engine (each data-parallel rank of a replica)."""
    eviction: Literal["lfu", "lru", "s3fifo"] = "lfu"
    """Which blocks give way when it is full."""


class DiskTierSpec(Spec):
    """Files on a disk of the worker's node. They outlive the worker, and serve the next one there."""

    path: str = Field(min_length=1)
    """A folder; made with access for its owner alone where it is missing. Every engine takes one of its
    subfolders for itself."""
    bytes: int = Field(default=10 << 30, ge=1 << 20, le=1 << 50)
    """Disk space of each engine."""
    lookup_timeout_s: float = Field(default=0.008, gt=0, le=10)
    """A question whether blocks are there that waits longer for reads and writes before it is a miss."""
    timeout_s: float = Field(default=1.0, gt=0, le=60)
    """A read that takes longer is a miss."""

    @model_validator(mode="after")
    def _looked_up_before_read(self) -> Self:
        _check_order(self.lookup_timeout_s, self.timeout_s)
        return self


class RedisTierSpec(RedisServerSpec):
    """A Redis that all workers read and write."""

    namespace: Name = "kvasir"
    """Keys begin with it. Deployments that share a Redis need not differ in it: blocks of another model or
    layout are other keys."""
    ttl_s: int = Field(default=3600, ge=1, le=30 * 86_400)
    """How long a block stays that nobody asks for."""
    max_value_bytes: int = Field(default=64 << 20, ge=1 << 10, le=512 << 20)
    """Blocks that are larger are not kept there."""
    connections: int = Field(default=2, ge=1, le=64)
    """Connections of each engine."""
    lookup_timeout_s: float = Field(default=0.008, gt=0, le=10)
    """A question whether blocks are there that takes longer is a miss."""
    timeout_s: float = Field(default=0.5, gt=0, le=60)
    """A read or write that takes longer has failed."""

    @model_validator(mode="after")
    def _looked_up_before_read(self) -> Self:
        _check_order(self.lookup_timeout_s, self.timeout_s)
        return self


class TiersSpec(Spec):
    """KV below the device. Each tier is used where it is given; none is by default."""

    cpu: CpuTierSpec | None = None
    disk: DiskTierSpec | None = None
    redis: RedisTierSpec | None = None
    write_back: Literal["prompts", "all"] = "all"
    """Whether blocks of generated tokens are kept too, or those of prompts alone."""
    write_back_bytes: int = Field(default=128 << 20, ge=1 << 20, le=64 << 30)
    """What may wait to be written to each of disk and Redis; beyond that blocks are not written."""
    prefetch: bool = True
    """Fetch what the router believes to be in a tier as soon as a request arrives, while it still waits."""

    @property
    def configured(self) -> bool:
        """Whether there is any tier."""
        return self.cpu is not None or self.disk is not None or self.redis is not None

    @property
    def memory(self) -> CpuTierSpec:
        """The memory that lower tiers pass through: the CPU tier, or one of default size."""
        return self.cpu or CpuTierSpec()


def _check_order(lookup_timeout_s: float, timeout_s: float) -> None:
    if lookup_timeout_s > timeout_s:
        raise ValueError(f"lookup_timeout_s {lookup_timeout_s:g} exceeds timeout_s {timeout_s:g}; lower it")
