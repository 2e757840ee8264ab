"""What a GPU costs to rent, and how many of them a node has and how they are linked.

Prices are list prices of one GPU for one hour, on demand, without discounts, as their providers published
them at `date`. They were written down without access to the providers' pages and change often: a plan that
matters is made with prices of one's own, in a file that `read_catalogue` reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.hardware.gpus import GPUS, Gpu

_GB = 1e9
PCIE_3, PCIE_4, PCIE_5 = 16 * _GB, 32 * _GB, 64 * _GB
"""Bytes per second in one direction of 16 lanes."""


@dataclass(frozen=True, slots=True)
class GpuOffer:
    """How a GPU is offered. `dollars_per_hour` is None where no price is known. `per_node` is the number of
    GPUs of a node, of which NVLink joins `nvlink_gpus` (1: none); others are linked by
    `pcie_bytes_per_s`, in one direction."""

    dollars_per_hour: float | None
    source: str
    date: str
    per_node: int = 8
    nvlink_gpus: int = 1
    pcie_bytes_per_s: float = PCIE_4

    @property
    def price_text(self) -> str:
        """The price with its source, for people."""
        if self.dollars_per_hour is None:
            return "no price known"
        return f"${self.dollars_per_hour:.2f}/h ({self.source}, {self.date})"


CPU_CORE_HOUR = 0.0425
"""Dollars for one hour of one CPU core, for workers without GPUs: AWS c6i, us-east-1, on demand, 2025-06."""
UNKNOWN = GpuOffer(None, "no price known", "")

_LAMBDA, _RUNPOD = "Lambda, on demand", "RunPod, secure cloud"

OFFERS: dict[str, GpuOffer] = {
    "GB200": GpuOffer(10.50, "CoreWeave, on demand", "2025-06", 4, 72, PCIE_5),
    "B200": GpuOffer(4.99, _LAMBDA, "2025-08", 8, 8, PCIE_5),
    "H200": GpuOffer(3.99, _RUNPOD, "2025-06", 8, 8, PCIE_5),
    "GH200-96GB": GpuOffer(1.49, _LAMBDA, "2025-06", 1, 1, PCIE_5),
    "H100-PCIe": GpuOffer(2.49, _LAMBDA, "2025-06", 8, 2, PCIE_5),
    "H100-NVL": GpuOffer(2.79, _RUNPOD, "2025-06", 8, 2, PCIE_5),
    "H100": GpuOffer(2.99, _LAMBDA, "2025-06", 8, 8, PCIE_5),
    "H20": GpuOffer(None, "no price known", "", 8, 8, PCIE_5),
    "A100-40GB": GpuOffer(1.29, _LAMBDA, "2025-06", 8, 8, PCIE_4),
    "A100": GpuOffer(1.79, _LAMBDA, "2025-06", 8, 8, PCIE_4),
    "L40S": GpuOffer(0.86, _RUNPOD, "2025-06"),
    "L40": GpuOffer(0.99, _RUNPOD, "2025-06"),
    "L4": GpuOffer(0.43, _RUNPOD, "2025-06"),
    "RTX-PRO-6000": GpuOffer(1.79, _RUNPOD, "2025-08", pcie_bytes_per_s=PCIE_5),
    "RTX-6000-Ada": GpuOffer(0.77, _RUNPOD, "2025-06"),
    "RTX-5090": GpuOffer(0.94, _RUNPOD, "2025-06", pcie_bytes_per_s=PCIE_5),
    "RTX-4090": GpuOffer(0.69, _RUNPOD, "2025-06"),
    "A40": GpuOffer(0.40, _RUNPOD, "2025-06", nvlink_gpus=2),
    "A10G": GpuOffer(1.006, "AWS g5.xlarge, us-east-1", "2025-06"),
    "A10": GpuOffer(0.75, _LAMBDA, "2025-06", 1),
    "V100-32GB": GpuOffer(3.90, "AWS p3dn.24xlarge / 8, us-east-1", "2025-06", 8, 8, PCIE_3),
    "V100": GpuOffer(0.55, _LAMBDA, "2025-06", 8, 8, PCIE_3),
    "T4": GpuOffer(0.526, "AWS g4dn.xlarge, us-east-1", "2025-06", 4, 1, PCIE_3),
}
"""By the names of the catalogue."""


@dataclass(frozen=True, slots=True)
class OfferedGpu:
    """A GPU of the catalogue and how it is offered."""

    gpu: Gpu
    offer: GpuOffer

    @property
    def name(self) -> str:
        """Its name in the catalogue."""
        return self.gpu.name


def catalogue() -> tuple[OfferedGpu, ...]:
    """Return all GPUs of the catalogue."""
    return tuple(OfferedGpu(gpu, OFFERS.get(gpu.name, UNKNOWN)) for gpu in GPUS)
