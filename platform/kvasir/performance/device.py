"""What the performance model knows of hardware: nominal rates of a device and of links between devices."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.hardware.gpus import Gpu

PCIE_BYTES_PER_S = 32e9
"""One direction of PCIe 4.0 x16, between GPUs without NVLink."""
NETWORK_BYTES_PER_S = 12.5e9
"""One port of 100 Gbit/s for each GPU, between nodes."""
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Device:
    """Nominal rates of one device: operations per second by width of the operands (0 for a width that it does
    not compute), bytes per second of its memory, and bytes per second in one direction of its link to other
    devices of the node and of its port to other nodes. `dollars_per_hour` is None where no price is known."""

    name: str
    half: float
    single: float
    fp8: float
    bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float = PCIE_BYTES_PER_S
    network_bytes_per_s: float = NETWORK_BYTES_PER_S
    per_node: int = GPUS_PER_NODE
    watts: float = 0.0
    dollars_per_hour: float | None = None

    def peak(self, dtype: str) -> float:
        """Return the operations per second with operands of `dtype`; a width without units of its own is
        computed in 16 bits, and 16 bits in 32 on devices that have only these."""
        if dtype == "float32":
            return self.single
        if dtype.startswith("fp8") and self.fp8:
            return self.fp8
        return self.half or self.single

    def ridge(self, dtype: str) -> float:
        """Return the operations per byte above which arithmetic limits, and memory below (Williams et al.,
        Roofline, 2009)."""
        return self.peak(dtype) / self.bytes_per_s


def device_of(gpu: Gpu, *, dollars_per_hour: float | None = None) -> Device:
    """Return a GPU of the catalogue as a device. NVLink's figure there counts both directions."""
    return Device(
        name=gpu.name,
        half=gpu.half,
        single=gpu.single,
        fp8=gpu.fp8,
        bytes_per_s=gpu.bytes_per_s,
        memory_bytes=gpu.memory_bytes,
        link_bytes_per_s=gpu.nvlink_bytes_per_s / 2 or PCIE_BYTES_PER_S,
        watts=gpu.watts,
        dollars_per_hour=dollars_per_hour,
    )


def reference_device(name: str) -> Device:
    """Return a device of which no rates are known, such as a CPU: 1 TFLOP/s and 100 GB/s for every dtype. Its
    coefficients have to be measured, and their fractions, which may exceed 1, refer to these rates."""
    return Device(name, half=1e12, single=1e12, fp8=0.0, bytes_per_s=1e11, memory_bytes=0)
