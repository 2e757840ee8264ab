"""A worker reports what its GPUs do, as NVIDIA's driver tells it, and serves as ever without any."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.clocks import SteppedClock
from tests.kit.engines.stub_engine import StubEngine

from kvasir.core.loads.gpu import GpuLoad
from kvasir.core.requests import EngineLoad
from kvasir_workers.engines.gpu_watched import READ_S, GpuReader, GpuWatchedEngine
from kvasir_workers.engines.vllm.gpu_counters import GpuCounters, visible_devices


class ScriptedNvml:
    """NVML as its bindings look, with GPUs `GPU-a` and `GPU-b` of which only those in `gpm` have performance
    metrics, which nobody may read if they are `secret`. `lost` cannot be read."""

    NVML_SUCCESS = 0
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10

    class NVMLError(Exception):
        pass

    def __init__(self, *gpm: str) -> None:
        self.gpm = gpm
        self.lost: set[str] = set()
        self.secret = False
        self.opened = 0
        self.samples: dict[int, str] = {}
        self.taken = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return ["GPU-a", "GPU-b"][index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-a", "GPU-b"):
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if handle in self.lost:
            raise self.NVMLError("the GPU has fallen off the bus")
        return SimpleNamespace(used=30 << 30, total=80 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if handle == "GPU-b":
            raise self.NVMLError("not supported")
        return 512_000

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(handle in self.gpm))

    def nvmlGpmSampleAlloc(self) -> int:
        number = max(self.samples, default=0) + 1
        self.samples[number] = ""
        return number

    def nvmlGpmSampleFree(self, sample: int) -> None:
        del self.samples[sample]

    def nvmlGpmSampleGet(self, handle: str, sample: int) -> None:
        if self.secret:
            raise self.NVMLError("no permission")
        self.taken += 1
        self.samples[sample] = f"{handle} {self.taken}"

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(), SimpleNamespace()])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        before, now = (int(self.samples[each].split()[1]) for each in (asked.sample1, asked.sample2))
        assert now == before + 1, "each reading compares the last two samples"
        for metric in asked.metrics:
            metric.nvmlReturn = self.NVML_SUCCESS
            metric.value = 40.0 if metric.metricId == self.NVML_GPM_METRIC_SM_UTIL else 85.0


def test_a_reading_has_use_memory_power_and_what_hopper_adds() -> None:
    nvml = ScriptedNvml("GPU-a")
    counters = GpuCounters(nvml, ["GPU-a", "1"])
    for _ in range(3):
        first, second = counters.read()
        assert first == GpuLoad(0, 0.97, 30 << 30, 80 << 30, 512.0, 0.4, 0.85)
        assert second == GpuLoad(1, 0.97, 30 << 30, 80 << 30, 0.0, None, None)
    counters.close()
    assert (nvml.opened, nvml.samples) == (0, {})


def test_a_gpu_whose_performance_metrics_are_secret_tells_the_rest() -> None:
    nvml = ScriptedNvml("GPU-a")
    nvml.secret = True
    counters = GpuCounters(nvml, ["0"])
    assert counters.read() == (GpuLoad(0, 0.97, 30 << 30, 80 << 30, 512.0),)
    counters.close()
    assert (nvml.opened, nvml.samples) == (0, {})


def test_a_gpu_that_is_lost_is_named_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    nvml = ScriptedNvml()
    counters = GpuCounters(nvml, ["0", "1"])
    nvml.lost.add("GPU-a")
    for _ in range(3):
        assert [gpu.index for gpu in counters.read()] == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "GPU 0 cannot be read: the GPU has fallen off the bus"
    ]
    nvml.lost.clear()
    assert len(counters.read()) == 2
    counters.close()


def test_a_gpu_that_is_unknown_opens_nothing() -> None:
    nvml = ScriptedNvml()
    with pytest.raises(nvml.NVMLError):
        GpuCounters(nvml, ["GPU-c"])
    assert nvml.opened == 0


@pytest.mark.parametrize(
    ("named", "devices", "found"),
    [
        (None, 2, ["0", "1"]),
        ("3,GPU-b, 5", 2, ["3", "GPU-b"]),
        ("", 1, []),
        (None, 1000, [str(index) for index in range(64)]),
    ],
)
def test_the_gpus_of_a_worker_are_the_first_that_it_may_use(
    named: str | None, devices: int, found: list[str]
) -> None:
    assert visible_devices(named, devices) == found


class Reader:
    def __init__(self) -> None:
        self.reads = 0
        self.closed = False

    def read(self) -> tuple[GpuLoad, ...]:
        self.reads += 1
        return (GpuLoad(0, self.reads / 10),)

    def close(self) -> None:
        self.closed = True


async def watched(reader: GpuReader | None, clock: SteppedClock) -> GpuWatchedEngine:
    engine = GpuWatchedEngine(StubEngine(), lambda devices: reader if devices == 1 else None, clock)
    await engine.start(lambda _: None, worker_id="w", epoch=1)
    return engine


async def test_the_load_of_a_worker_has_the_last_reading_of_its_gpus() -> None:
    reader, clock = Reader(), SteppedClock()
    engine = await watched(reader, clock)
    assert engine.load().gpus == ()
    async with asyncio.timeout(10):
        while reader.reads < 2:
            await asyncio.sleep(0)
    (gpu,) = engine.load().gpus
    assert gpu.busy >= 0.1
    assert set(clock.slept) == {READ_S}
    await engine.stop()
    assert reader.closed


async def test_a_worker_without_gpus_reads_nothing() -> None:
    engine = await watched(None, SteppedClock())
    assert engine.load() == EngineLoad()
    await engine.stop()
