"""Construction of the connector's tier halves for one engine.

Imported only by engines with tiers, as it imports all that stores and moves blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.config.spec.tiers import TiersSpec
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion
from kvasir_workers.connector.settings import Settings
from kvasir_workers.connector.tiers.scheduler import TierScheduler
from kvasir_workers.connector.tiers.worker import TierWorker
from kvasir_workers.tiers.copier import BlockCopier, DeviceCopier, HostCopier, SlotPart, page_lock
from kvasir_workers.tiers.memory import SharedMemory, SharedName
from kvasir_workers.tiers.setup import mark_of, open_store

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def make_tier_worker(
    kv_caches: Mapping[str, torch.Tensor], regions: Sequence[KvRegion], offset: int
) -> TierWorker:
    """Return the worker half of the rank whose part of each slot begins at byte `offset`; `regions` are those
    of `kv_caches`."""
    layers = list({tensor.data_ptr(): tensor for tensor in kv_caches.values()}.values())

    def copier(name: SharedName) -> BlockCopier:
        memory = SharedMemory.open(name)
        part = SlotPart(memory, offset)
        if layers[0].device.type == "cpu":
            return HostCopier(regions, part, time.monotonic)
        page_lock(memory)
        return DeviceCopier(layers, regions[0].blocks, part, time.monotonic)

    return TierWorker(copier, pause=time.sleep)


def make_tier_scheduler(
    settings: Settings,
    config: VllmConfig,
    layout: KvLayout,
    *,
    window: int | None,
    on_device: Callable[[bytes], bool],
) -> TierScheduler:
    """Return the scheduler half over the tiers of `settings`, for KV of this `layout`. Raise ConfigError as
    open_store."""
    spec = TiersSpec.model_validate(settings.tiers)
    # A quantized cache reports its dtype as bytes, without the format.
    name = f"{settings.model} {config.cache_config.cache_dtype} {config.model_config.dtype}"
    folder = Path(config.model_config.model)
    mark = mark_of(name, settings.revision, layout, folder, settings.adapters)
    store, memory = open_store(spec, layout, mark, time.monotonic)
    return TierScheduler(
        store,
        memory.name,
        spec,
        model=settings.model,
        block_size=layout.block_size,
        ranks=layout.tensor_parallel_size,
        window=window,
        on_device=on_device,
        now=time.monotonic,
    )
