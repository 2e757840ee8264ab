"""vLLM's CPU worker, with the two collectives by which data-parallel ranks exchange the tokens of experts.

vLLM's CPU build selects an exchange by all-gather and reduce-scatter, and lacks these for unequal numbers of
tokens. With them, the rest of vLLM's data parallelism runs on CPUs. For tests only: `engine.args.worker_cls`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.worker.cpu_worker import CPUWorker


def _gathered(communicator: Any, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=communicator.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def all_gatherv(communicator: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Return every rank's rows of a tensor, or of each of a list."""
    assert dim == 0
    single = isinstance(tensors, torch.Tensor)
    given = [tensors] if single else tensors
    counts = sizes or [len(given[0])] * communicator.world_size
    found = [_gathered(communicator, tensor, counts) for tensor in given]
    return found[0] if single else found


def reduce_scatterv(
    communicator: Any, tensor: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return the sum over ranks of this rank's rows."""
    assert dim == 0
    counts = sizes or [len(tensor) // communicator.world_size] * communicator.world_size
    summed = tensor.contiguous().clone()
    dist.all_reduce(summed, group=communicator.device_group)
    first = sum(counts[: communicator.rank_in_group])
    return summed[first : first + counts[communicator.rank_in_group]].clone()


CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv


class GatheringWorker(CPUWorker):  # type: ignore[misc]  # vLLM ships no type information here
    """See the module."""
