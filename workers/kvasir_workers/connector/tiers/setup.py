"""Construction of the connector's tier halves for one engine.

Imported only by engines with tiers, as it imports all that stores and moves blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.config.spec.tiers import TiersSpec
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion
from kvasir_workers.connector.settings import Settings
from kvasir_workers.connector.tiers.orders import ArenaParts
from kvasir_workers.connector.tiers.scheduler import TierScheduler
from kvasir_workers.connector.tiers.worker import TierWorker
from kvasir_workers.tiers.copier import BlockCopier, DeviceCopier, HostCopier, SlotPart, page_lock
from kvasir_workers.tiers.memory import SharedMemory
from kvasir_workers.tiers.setup import mark_of, open_store

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def make_tier_worker(
    kv_caches: Mapping[str, torch.Tensor], regions: Sequence[KvRegion], rank: int
) -> TierWorker:
    """Return the worker half of a rank, which is numbered as in ArenaParts; `regions` are those of
    `kv_caches`."""
    layers = list({tensor.data_ptr(): tensor for tensor in kv_caches.values()}.values())

    def copier(arena: ArenaParts) -> BlockCopier:
        if arena.shared is None:
            part = SlotPart(SharedMemory.create(arena.slots, sum(each.block_bytes for each in regions)), 0)
        else:
            part = SlotPart(SharedMemory.open(arena.shared), arena.offsets[rank])
        if layers[0].device.type == "cpu":
            return HostCopier(regions, part, time.monotonic)
        page_lock(part.memory)
        return DeviceCopier(layers, regions[0].blocks, part, time.monotonic)

    return TierWorker(copier, pause=time.sleep)


def make_tier_scheduler(
    settings: Settings,
    config: VllmConfig,
    layouts: Sequence[KvLayout],
    *,
    window: int | None,
    on_device: Callable[[bytes], bool],
) -> TierScheduler:
    """Return the scheduler half over the tiers of `settings`, for ranks with KV of these `layouts`, in the
    order of ArenaParts. Raise ConfigError as open_store."""
    spec = TiersSpec.model_validate(settings.tiers)
    # A quantized cache reports its dtype as bytes, without the format.
    name = f"{settings.model} {config.cache_config.cache_dtype} {config.model_config.dtype}"
    folder = Path(config.model_config.model)
    stages = layouts[:: layouts[0].tensor_parallel_size]
    whole = replace(
        layouts[0],
        layers=sum(stage.layers for stage in stages),
        bytes_per_block=sum(stage.bytes_per_block for stage in stages),
    )
    mark = mark_of(name, settings.revision, whole, folder, settings.adapters, stages=len(stages))
    together = config.parallel_config.nnodes_within_dp == 1
    store, memory = open_store(spec, whole, mark, time.monotonic, together=together)
    arena = ArenaParts(store.capacity, part_offsets(layouts), None if memory is None else memory.name)
    return TierScheduler(
        store,
        arena,
        spec,
        model=settings.model,
        block_size=layouts[0].block_size,
        window=window,
        on_device=on_device,
        now=time.monotonic,
    )


def part_offsets(layouts: Sequence[KvLayout]) -> tuple[int, ...]:
    """Return where the part of each rank begins in a slot, in the order of `layouts`, which is that of
    ArenaParts. The parts of one tensor-parallel rank follow each other, so that a slot's bytes do not depend
    on the layers at which stages end."""
    ranks = layouts[0].tensor_parallel_size
    sizes = [layout.bytes_per_block for layout in layouts[::ranks]]
    starts = list(accumulate(sizes, initial=0))
    return tuple(rank * starts[-1] + start for start in starts[:-1] for rank in range(ranks))
