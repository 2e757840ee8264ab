"""What NVIDIA's driver says of the GPUs that this process may use, over NVML.

The bindings are those that vLLM ships (nvidia-ml-py), so that they fit its GPUs. Busy multiprocessors and the
use of memory bandwidth come from GPU performance metrics (GPM), which Hopper and later have: each reading
compares two samples. See https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from kvasir.core.loads.gpu import MOST_GPUS, GpuLoad

log = logging.getLogger(__name__)

_MILLI = 1e-3
_PERCENT = 0.01


def open_gpus(devices: int) -> GpuCounters | None:
    """Return the counters of the first `devices` GPUs that this process may use; None if there is no driver
    of NVIDIA's, or it does not know them, which is logged. Call it in a thread: it opens the driver."""
    from vllm.utils.import_utils import import_pynvml

    nvml: Any = import_pynvml()
    try:
        return GpuCounters(nvml, visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), devices))
    except (nvml.NVMLError, OSError) as error:
        log.info("no GPU metrics: %s", error)
        return None


def visible_devices(named: str | None, devices: int) -> list[str]:
    """Return the indexes or UUIDs of the first `devices` GPUs of a CUDA_VISIBLE_DEVICES; all are visible if
    it is not set."""
    count = min(devices, MOST_GPUS)
    every = map(str, range(count)) if named is None else (part.strip() for part in named.split(","))
    return [each for each in every if each][:count]


class GpuCounters:
    """Reads `devices`, each an index or a UUID, with `nvml`, a module like pynvml. Raises its NVMLError. Not
    for two threads at once; `close` it."""

    def __init__(self, nvml: Any, devices: list[str]) -> None:
        self._nvml = nvml
        self._lost: set[int] = set()
        nvml.nvmlInit()
        try:
            self._gpus = [_Gpu(nvml, index, _handle(nvml, name)) for index, name in enumerate(devices)]
        except BaseException:
            nvml.nvmlShutdown()
            raise

    def read(self) -> tuple[GpuLoad, ...]:
        """Return what each GPU did since the call before. A GPU that cannot be read is left out."""
        found = []
        for gpu in self._gpus:
            try:
                found.append(gpu.read())
            except self._nvml.NVMLError as error:
                # Such as one that has fallen off the bus: it is named once, and not every few seconds.
                if gpu.index not in self._lost:
                    log.warning("GPU %d cannot be read: %s", gpu.index, error)
                self._lost.add(gpu.index)
            else:
                self._lost.discard(gpu.index)
        return tuple(found)

    def close(self) -> None:
        """Release the samples and the driver."""
        for gpu in self._gpus:
            gpu.close()
        self._nvml.nvmlShutdown()


class _Gpu:
    """One GPU. Its samples are two buffers: the sample before, and the next one."""

    def __init__(self, nvml: Any, index: int, handle: Any) -> None:
        self.index = index
        self._nvml = nvml
        self._handle = handle
        self._samples: list[Any] = []
        try:
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
                nvml.nvmlGpmSampleGet(handle, self._samples[0])
        except nvml.NVMLError:
            # An older driver, or a container that may not read them.
            self.close()

    def read(self) -> GpuLoad:
        """Raise NVMLError."""
        nvml, handle = self._nvml, self._handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        sm_active, dram_active = self._detail()
        return GpuLoad(
            self.index,
            nvml.nvmlDeviceGetUtilizationRates(handle).gpu * _PERCENT,
            int(memory.used),
            int(memory.total),
            _power_w(nvml, handle),
            sm_active,
            dram_active,
        )

    def _detail(self) -> tuple[float | None, float | None]:
        """Return the fractions of busy multiprocessors and of used memory bandwidth since the sample before;
        None where the driver does not tell."""
        if not self._samples:
            return None, None
        nvml = self._nvml
        before, now = self._samples
        nvml.nvmlGpmSampleGet(self._handle, now)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 2
        asked.sample1, asked.sample2 = before, now
        asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        asked.metrics[1].metricId = nvml.NVML_GPM_METRIC_DRAM_BW_UTIL
        nvml.nvmlGpmMetricsGet(asked)
        self._samples = [now, before]
        sm_active, dram_active = (
            each.value * _PERCENT if each.nvmlReturn == nvml.NVML_SUCCESS else None
            for each in (asked.metrics[0], asked.metrics[1])
        )
        return sm_active, dram_active

    def close(self) -> None:
        """Release the samples."""
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []


def _handle(nvml: Any, name: str) -> Any:
    return (
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
    )


def _power_w(nvml: Any, handle: Any) -> float:
    """Return the power in watts; 0 for a GPU that does not measure it."""
    try:
        return float(nvml.nvmlDeviceGetPowerUsage(handle)) * _MILLI
    except nvml.NVMLError:
        return 0.0
