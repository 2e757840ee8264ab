"""Which engines can serve a model on some hardware: precision, parallel layout, and whether they fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvasir.hardware.gpus import GIB
from kvasir.hardware.offers import GpuOffer, OfferedGpu
from kvasir.performance.coefficients import Coefficients
from kvasir.performance.device import Device, device_of, reference_device
from kvasir.performance.engines import engine_model
from kvasir.performance.step import EngineModel
from kvasir.sizing.fit import Fit, Need, RankMemory, fit, need_of
from kvasir.sizing.kv import kv_need
from kvasir.sizing.shape import EngineShape
from kvasir_platform.capacity.assumed import FROM_DATA_SHEET, AssumedCoefficients
from kvasir_platform.capacity.models import PlannedModel

CPU = "CPU"
UTILIZATION = 0.9
"""Of the memory, as engine.gpu_memory_utilization has it by default."""
MOST_SEQUENCES = 256
_TENSOR_SIZES = (1, 2, 4, 8)
_STAGES = (2, 4)
_EXPERT_RANKS = (8, 16, 32)
_CPU_CORES = (1, 2, 4, 8, 16, 32, 64)
_CORE_FLOPS = 6.4e10
"""A core with AVX-512 at 2 GHz: two units of sixteen numbers, multiplied and added."""
_CORE_BYTES_PER_S = 8e9
_CORE_MEMORY = 4 * GIB
_MEASURED_MEMORY = 16 * GIB
CPU_CORE = GpuOffer(0.09, "AWS c7i, two vCPUs, us-east-1", "2025-06")
CHUNKS = (2048, 8192)
"""Values of engine.max_num_batched_tokens that plans compare."""


class MeasuredTransfer(NamedTuple):
    """The KV transfer between two replicas that a profile measured: fixed seconds, and seconds of a byte."""

    fixed_s: float
    byte_s: float


@dataclass(frozen=True, slots=True)
class HardwareChoice:
    """A kind of hardware, and how many devices there are, None for as many as are wanted. `offered` is None
    for CPUs, whose device is one core, or, if it is not `divisible`, as many as a profile was measured on."""

    device: Device
    offered: OfferedGpu | None
    count: int | None = None
    assumed: AssumedCoefficients = FROM_DATA_SHEET
    divisible: bool = True
    transfer: MeasuredTransfer | None = None

    @property
    def coefficients(self) -> Coefficients:
        """What plans are sized with."""
        return self.assumed.value

    @property
    def name(self) -> str:
        """Its name in the catalogue."""
        return self.device.name

    @property
    def price(self) -> float:
        """Dollars for a device and hour; 0 where no price is known, which reports say."""
        return self.device.dollars_per_hour or 0.0

    @property
    def offer(self) -> GpuOffer:
        """How it is offered."""
        return CPU_CORE if self.offered is None else self.offered.offer

    def linked(self, ranks: int) -> Device:
        """Return the device with the link that an exchange among `ranks` has: NVLink among as many as it
        joins, else PCIe."""
        if self.offered is None:
            return self.device
        nvlink = self.offered.gpu.nvlink_bytes_per_s / 2
        joined = nvlink > 0 and ranks <= self.offer.nvlink_gpus
        return replace(self.device, link_bytes_per_s=nvlink if joined else self.offer.pcie_bytes_per_s)

    def link_name(self, ranks: int) -> str:
        """Return what an exchange among `ranks` devices goes over."""
        if ranks > self.device.per_node:
            return "network"
        nvlink = self.offered is not None and self.offered.gpu.nvlink_bytes_per_s > 0
        return "NVLink" if nvlink and ranks <= self.offer.nvlink_gpus else "PCIe"


def gpu_choice(
    offered: OfferedGpu, count: int | None = None, assumed: AssumedCoefficients = FROM_DATA_SHEET
) -> HardwareChoice:
    """Return GPUs of the catalogue as a choice."""
    device = device_of(offered.gpu, dollars_per_hour=offered.offer.dollars_per_hour)
    return HardwareChoice(replace(device, per_node=offered.offer.per_node), offered, count, assumed)


def cpu_choice(cores: int | None = None) -> HardwareChoice:
    """Return CPU cores as a choice: rough rates of a current server, to be replaced by a profile."""
    core = Device(
        CPU,
        half=_CORE_FLOPS,
        single=_CORE_FLOPS,
        fp8=0.0,
        bytes_per_s=_CORE_BYTES_PER_S,
        memory_bytes=_CORE_MEMORY,
        dollars_per_hour=CPU_CORE.dollars_per_hour,
    )
    return HardwareChoice(core, None, cores)


def measured_cpu(count: int | None, assumed: AssumedCoefficients) -> HardwareChoice:
    """Return engines on CPUs as a profile measured them, whose coefficients refer to reference rates. A
    profile does not say on how many cores, so that they have no price."""
    device = replace(reference_device(CPU), memory_bytes=_MEASURED_MEMORY)
    return HardwareChoice(device, None, count, assumed, divisible=False)


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One way to serve a model on `devices` devices: what it needs, how it fits, how fast it is."""

    hardware: HardwareChoice
    model: PlannedModel
    shape: EngineShape
    engine: EngineModel
    need: Need
    fit: Fit
    devices: int

    @property
    def fits(self) -> bool:
        """Whether weights, working memory and one request of max_model_len fit."""
        return not self.fit.missing

    @property
    def dollars_per_hour(self) -> float:
        """The price of one replica."""
        return self.devices * self.hardware.price

    @property
    def layout(self) -> str:
        """The parallel layout, such as `TP 4`."""
        shape = self.shape
        parts = [f"TP {shape.tensor}"] if shape.tensor > 1 else []
        parts += [f"PP {shape.pipeline}"] if shape.pipeline > 1 else []
        parts += [f"DP {shape.data}"] if shape.data > 1 else []
        parts += ["EP"] if shape.expert_parallel else []
        return " ".join(parts) or "one device"

    @property
    def title(self) -> str:
        """Hardware, layout and precision, such as `4 x H100, TP 4, fp8`."""
        unit = "core" if self.hardware.divisible else "CPU engine"
        cores = f"1 {unit}" if self.devices == 1 else f"{self.devices} {unit}s"
        parts = [cores if self.hardware.offered is None else f"{self.devices} x {self.hardware.name}"]
        parts += [self.layout] if self.shape.ranks > 1 else []
        parts += [self.shape.quantization] if self.shape.quantization != "none" else []
        parts += [f"{self.shape.kv_dtype} KV"] if self.shape.kv_dtype != "auto" else []
        return ", ".join(parts)

    @property
    def stage_free(self) -> tuple[int, ...]:
        """Bytes for KV on a rank of each stage."""
        return tuple(
            max(0, self.fit.memory.budget - held - self.need.working.total) for held in self.need.weights
        )

    def requests(self, context: float) -> float:
        """Return how many requests of `context` tokens have room in memory; infinite for a model that keeps
        nothing."""
        length = max(1, math.ceil(context))
        return kv_need(self.model.config, replace(self.shape, max_model_len=length)).requests(self.stage_free)

    def seats(self, context: float) -> float:
        """Return how many requests of `context` tokens run at once."""
        return min(float(self.shape.max_num_seqs), self.requests(context))

    def longest_context(self, requests: int = 1) -> int:
        """Return the most tokens of each of `requests` concurrent requests that have room."""
        limit = self.model.config.max_positions or 1 << 20
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.requests(middle) >= requests else (low, middle - 1)
        return low


def engine_option(
    model: PlannedModel, hardware: HardwareChoice, shape: EngineShape, *, cores: int = 1
) -> EngineOption:
    """Return the engine of this shape. On CPUs, `cores` cores are its device."""
    device = hardware.linked(max(shape.tensor, shape.data if shape.expert_parallel else 1))
    if hardware.offered is None:
        device = _cores(device, cores)
        shape = replace(shape, cuda_graphs=False)
    need = need_of(model.files, shape)
    return EngineOption(
        hardware,
        model,
        shape,
        engine_model(model.files, device, shape, hardware.coefficients),
        need,
        fit(need, RankMemory(device.memory_bytes, UTILIZATION)),
        cores if hardware.offered is None else shape.ranks,
    )


def _cores(core: Device, cores: int) -> Device:
    return replace(
        core,
        half=core.half * cores,
        single=core.single * cores,
        bytes_per_s=core.bytes_per_s * cores,
        memory_bytes=core.memory_bytes * cores,
    )


@dataclass(frozen=True, slots=True)
class PrecisionChoice:
    """How weights are quantized at load, and what the KV cache holds."""

    quantization: str = "none"
    kv_dtype: str = "auto"


def engine_options(
    model: PlannedModel,
    hardware: HardwareChoice,
    *,
    max_model_len: int,
    precision: PrecisionChoice,
    chunk: int,
) -> Iterator[EngineOption]:
    """Yield the engines that fit: of each layout the smallest, and larger ones that may be faster."""
    base = EngineShape(
        max_model_len=max_model_len,
        max_num_seqs=MOST_SEQUENCES,
        max_num_batched_tokens=chunk,
        quantization=precision.quantization,
        kv_dtype=precision.kv_dtype,
    )
    found = False
    for shape, cores in layout_shapes(model, hardware, base):
        option = engine_option(model, hardware, shape, cores=cores)
        # More than a node takes is only worth it for what does not fit otherwise, and for experts.
        if option.fits and _available(option) and (model.mixture or not found or _in_a_node(option)):
            found = True
            yield option


def layout_shapes(
    model: PlannedModel, hardware: HardwareChoice, base: EngineShape
) -> Iterator[tuple[EngineShape, int]]:
    """Yield the layouts of `base` that the model allows, whether they fit or not, each with the number of
    cores that a device on CPUs has."""
    if hardware.offered is None:
        for cores in _CPU_CORES if hardware.divisible else (1,):
            yield base, cores
        return
    for shape in (*_within_a_node(model, hardware, base), *_over_nodes(model, hardware, base)):
        yield shape, 1


def _in_a_node(option: EngineOption) -> bool:
    return option.hardware.offered is None or option.devices <= option.hardware.device.per_node


def _available(option: EngineOption) -> bool:
    return option.hardware.count is None or option.devices <= option.hardware.count


def _within_a_node(model: PlannedModel, hardware: HardwareChoice, base: EngineShape) -> Iterator[EngineShape]:
    node = hardware.device.per_node
    for tensor in _TENSOR_SIZES:
        if tensor > node or model.heads % tensor:
            continue
        yield replace(base, tensor=tensor)
        if model.mixture and tensor > 1:
            yield replace(base, tensor=tensor, expert_parallel=True)
    if hardware.link_name(2) == "PCIe":
        # Without NVLink, stages exchange far less than the ranks of a layer.
        for stages in _STAGES:
            if stages <= node:
                yield replace(base, pipeline=stages)


def _over_nodes(model: PlannedModel, hardware: HardwareChoice, base: EngineShape) -> Iterator[EngineShape]:
    node = max(size for size in _TENSOR_SIZES if size <= hardware.device.per_node)
    if model.heads % node == 0:
        for stages in _STAGES:
            yield replace(base, tensor=node, pipeline=stages)
    if model.mixture:
        for ranks in _EXPERT_RANKS:
            if model.work.experts % ranks == 0:
                yield replace(base, data=ranks, expert_parallel=True)
