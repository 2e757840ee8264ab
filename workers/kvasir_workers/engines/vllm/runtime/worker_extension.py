"""Kvasir's extension of vLLM's worker class, in the process that holds the KV cache.

vLLM mixes this class into its worker and lets the front call its methods with `collective_rpc`. Names have
the prefix `kvasir_`, because vLLM rejects an extension that shadows an attribute of the worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from kvasir.core.identity import HEAD_MAJOR
from kvasir_workers.connector.kv_memory import memory_order
from kvasir_workers.engines.vllm.runtime.adapter_logits import serve_prompt_rows
from kvasir_workers.engines.vllm.setup.hardware import cpu_name


class EngineExtension:
    """Methods for `collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any
    cache_config: Any
    parallel_config: Any
    lora_config: Any
    device: Any

    def kvasir_kv_layout(self) -> dict[str, Any]:
        """Return this rank's KV layout in memory: the fields of kvasir.core.identity.KvLayout except
        `tensor_parallel_size`. `layout` is kinds of layers : shape of one block without its heads : axes by
        falling stride. Models that mix kinds of layers report the first one's heads."""
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        spec = groups[0].kv_cache_spec
        first = self.model_runner.kv_caches[0]
        shape = "x".join(str(extent) for extent in first.shape[2 if first.dim() == len(HEAD_MAJOR) else 1 :])
        # Quantized KV is stored as plain bytes; its format is in the configuration.
        stored = str(first.dtype).removeprefix("torch.")
        dtype = stored if self.cache_config.cache_dtype == "auto" else str(self.cache_config.cache_dtype)
        kinds = "+".join(type(group.kv_cache_spec).__name__ for group in groups)
        return {
            "block_size": int(spec.block_size),
            "dtype": dtype,
            "layout": f"{kinds}:{shape}:{memory_order(first)}",
            "layers": sum(len(group.layer_names) for group in groups),
            "kv_heads": int(getattr(spec, "num_kv_heads", 0)),
            "head_size": int(getattr(spec, "head_size", 0)),
            "bytes_per_block": sum(_group_bytes(group) for group in groups),
        }

    def kvasir_model(self) -> dict[str, Any]:
        """Return this rank's share of the weights, `parameters` and `bytes`; the size of most of them,
        `element_bytes`; and the driver's name of its `device`."""
        weights = list(self.model_runner.model.parameters())
        sizes: Counter[int] = Counter()
        for weight in weights:
            sizes[weight.element_size()] += weight.numel()
        return {
            "parameters": sum(sizes.values()),
            "bytes": sum(size * count for size, count in sizes.items()),
            "element_bytes": sizes.most_common(1)[0][0],
            "device": _device_name(self.device),
        }

    def kvasir_serve_prompt_rows(self) -> None:
        """Let prompts be scored by an engine that has adapters."""
        if self.device.type == "cpu" and self.lora_config is not None:
            serve_prompt_rows()

    def kvasir_leave_with(self, front_pid: int) -> int:
        """End this rank's process, and the engine core above it, when process `front_pid` has ended.

        A killed front cannot notify its core, which would otherwise keep its memory. On a node without a
        front, this process leaves with the process above it and above its core, if it has one. Returns this
        process's id.
        """
        parallel = self.parallel_config
        if parallel.node_rank:
            cored = parallel.data_parallel_size > 1 and not parallel.node_rank_within_dp
            front_pid = _parent_of(os.getppid()) if cored else os.getppid()
        front = os.pidfd_open(front_pid)
        # Opened at once: an orphan is adopted by a reaper, which may be the supervisor of the whole
        # deployment.
        above = os.getppid()
        core = None if above == front_pid else os.pidfd_open(above)
        threading.Thread(
            target=_leave_with, args=(front, core), name="kvasir-leave-with", daemon=True
        ).start()
        return os.getpid()


def _parent_of(process: int) -> int:
    """Return the id of a process's parent. Raise OSError if the process has ended."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("\nPPid:")[2].split()[0])


def _group_bytes(group: Any) -> int:
    """Return the bytes of one block of a group, whose layers may differ in size."""
    spec = group.kv_cache_spec
    page = int(spec.page_size_bytes)
    return page if hasattr(spec, "kv_cache_specs") else page * len(group.layer_names)


def _device_name(device: Any) -> str:
    if device.type != "cuda":
        return cpu_name()
    from torch import cuda

    return str(cuda.get_device_properties(device).name)


def _leave_with(front: int, core: int | None) -> None:
    poll = select.poll()
    poll.register(front, select.POLLIN)
    poll.poll()
    if core is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
