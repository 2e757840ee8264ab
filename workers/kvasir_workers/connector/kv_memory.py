"""vLLM's KV cache tensors as regions, and as a layout that two engines can compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvasir.core.errors import ConfigError
from kvasir.core.identity import HEAD_MAJOR, KvLayout
from kvasir.ports.transfer import KvRegion

if TYPE_CHECKING:
    import torch

    from kvasir_workers.connector.kv_group import KvGroup


def regions_of(kv_caches: Mapping[str, torch.Tensor], blocks: int) -> tuple[KvRegion, ...]:
    """Return one region per distinct tensor, in layer order; layers that share KV share a region.

    Raise ConfigError if blocks are not the tensors' outermost dimension.
    """
    regions: dict[int, KvRegion] = {}
    for name, tensor in kv_caches.items():
        rows, stride = tensor.shape[0], tensor.stride(0)
        if rows % blocks or stride != max(tensor.stride()) or tensor.numel() != rows * stride:
            raise ConfigError(
                f"KV of layer {name} cannot be moved by blocks: shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}, {blocks} blocks"
            )
        device = "cpu" if tensor.device.type == "cpu" else f"{tensor.device.type}:{tensor.device.index or 0}"
        block_bytes = tensor.numel() * tensor.element_size() // blocks
        regions.setdefault(tensor.data_ptr(), KvRegion(tensor.data_ptr(), block_bytes, blocks, device))
    return tuple(regions.values())


def layers_of(kv_caches: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the number of each region's first layer in the model, in the order of `regions_of`. Raise
    ConfigError if a layer's name has no number."""
    found: dict[int, int] = {}
    for name, tensor in kv_caches.items():
        number = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        if number is None:
            raise ConfigError(f"KV of layer {name} cannot be moved between stages: it has no number")
        found.setdefault(tensor.data_ptr(), number)
    return list(found.values())


def layout_of(
    kv_caches: Mapping[str, torch.Tensor], regions: tuple[KvRegion, ...], group: KvGroup, ranks: int
) -> KvLayout:
    """Return the layout of the KV cache."""
    sample = next(iter(kv_caches.values()))
    return KvLayout(
        block_size=group.block_size,
        dtype=str(sample.dtype).removeprefix("torch."),
        layout=memory_order(sample),
        layers=len(regions),
        kv_heads=group.kv_heads,
        head_size=group.head_size,
        bytes_per_block=sum(region.block_bytes for region in regions),
        tensor_parallel_size=ranks,
    )


def memory_order(cache: torch.Tensor) -> str:
    """Return a layer's axes by falling stride: B blocks, H heads, N tokens, C contents if it has these
    four."""
    names = HEAD_MAJOR if cache.dim() == len(HEAD_MAJOR) else "0123456789"
    return "".join(names[axis] for axis in sorted(range(cache.dim()), key=lambda axis: -cache.stride(axis)))
