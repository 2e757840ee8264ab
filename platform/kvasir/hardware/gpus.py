"""The catalogue of GPUs: what a deployment can be sized for on a machine without them.

Peaks are dense and at the base specification. `source` is where the manufacturer, or a provider, publishes
them, and https://developer.nvidia.com/cuda-gpus has the compute capabilities; the table was written without
access to these pages. `memory_bytes` is what a process is expected to find (cudaMemGetInfo): less than the
data sheet's figure, because ECC and the driver keep a part. None of it was measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

GIB = 1 << 30
_PAGES = "https://www.nvidia.com/en-us/"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One model of GPU. `pattern` is a regular expression for the name that its driver reports. FLOP/s by
    width of the operands: `half` for float16 and bfloat16, `single` for float32, `fp8` is 0 without such
    units. `nvlink_bytes_per_s` is the sum of both directions to all neighbours, 0 without NVLink; `watts` is
    the maximum power. `capability` is the CUDA compute capability."""

    name: str
    pattern: str
    memory_bytes: int
    bytes_per_s: float
    half: float
    single: float
    fp8: float
    watts: int
    nvlink_bytes_per_s: float
    capability: tuple[int, int]
    source: str


def _gpu(
    name: str,
    pattern: str,
    *,
    gib: float,
    tb_per_s: float,
    tflops: tuple[float, float, float],
    watts: int,
    nvlink: int,
    capability: tuple[int, int],
    source: str,
) -> Gpu:
    """Return a row of the table. `tflops` are half, single and fp8; `nvlink` is in GB/s."""
    half, single, fp8 = (each * 1e12 for each in tflops)
    address = source if ":" in source else _PAGES + source
    memory = int(gib * GIB)
    return Gpu(
        name, pattern, memory, tb_per_s * 1e12, half, single, fp8, watts, nvlink * 1e9, capability, address
    )


_A100 = "data-center/a100/"
_H100 = "data-center/h100/"
_PRO_6000 = "data-center/rtx-pro-6000-blackwell-server-edition/"
_V100 = "data-center/v100/"

GPUS: tuple[Gpu, ...] = (
    _gpu("GB200", r"\bGB200\b", gib=184.0, tb_per_s=8.0, tflops=(2500, 80, 5000), watts=1200, nvlink=1800,
         capability=(10, 0), source="data-center/gb200-nvl72/"),
    _gpu("B200", r"\bB200\b", gib=178.3, tb_per_s=8.0, tflops=(2250, 75, 4500), watts=1000, nvlink=1800,
         capability=(10, 0), source="data-center/dgx-b200/"),
    _gpu("H200", r"\bH200\b", gib=139.7, tb_per_s=4.8, tflops=(989, 67, 1979), watts=700, nvlink=900,
         capability=(9, 0), source="data-center/h200/"),
    _gpu("GH200-96GB", r"\bGH200\b", gib=94.5, tb_per_s=4.0, tflops=(989, 67, 1979), watts=1000, nvlink=900,
         capability=(9, 0), source="data-center/grace-hopper-superchip/"),
    _gpu("H100-PCIe", r"\bH100 PCIe\b", gib=79.1, tb_per_s=2.0, tflops=(756, 51, 1513), watts=350, nvlink=600,
         capability=(9, 0), source=_H100),
    _gpu("H100-NVL", r"\bH100 NVL\b", gib=93.0, tb_per_s=3.9, tflops=(835, 60, 1671), watts=400, nvlink=600,
         capability=(9, 0), source=_H100),
    _gpu("H100", r"\bH100\b", gib=79.1, tb_per_s=3.35, tflops=(989, 67, 1979), watts=700, nvlink=900,
         capability=(9, 0), source=_H100),
    _gpu("H20", r"\bH20\b", gib=95.0, tb_per_s=4.0, tflops=(148, 44, 296), watts=400, nvlink=900,
         capability=(9, 0), source="no data sheet of NVIDIA: as resellers of HGX H20 state"),
    _gpu("A100-40GB", r"\bA100-(SXM4|PCIE)-40GB\b", gib=39.4, tb_per_s=1.555, tflops=(312, 19.5, 0),
         watts=400, nvlink=600, capability=(8, 0), source=_A100),
    _gpu("A100", r"\bA100\b", gib=79.1, tb_per_s=1.935, tflops=(312, 19.5, 0), watts=400, nvlink=600,
         capability=(8, 0), source=_A100),
    _gpu("L40S", r"\bL40S\b", gib=44.4, tb_per_s=0.864, tflops=(362, 91.6, 733), watts=350, nvlink=0,
         capability=(8, 9), source="data-center/l40s/"),
    _gpu("L40", r"\bL40\b", gib=44.4, tb_per_s=0.864, tflops=(181, 90.5, 362), watts=300, nvlink=0,
         capability=(8, 9), source="data-center/l40/"),
    _gpu("L4", r"\bL4\b", gib=22.0, tb_per_s=0.3, tflops=(121, 30.3, 242), watts=72, nvlink=0,
         capability=(8, 9), source="data-center/l4/"),
    _gpu("RTX-PRO-6000", r"\bRTX PRO 6000 Blackwell\b", gib=94.9, tb_per_s=1.597, tflops=(503, 120, 1007),
         watts=600, nvlink=0, capability=(12, 0), source=_PRO_6000),
    _gpu("RTX-6000-Ada", r"\bRTX 6000 Ada\b", gib=44.4, tb_per_s=0.96, tflops=(364, 91.1, 728), watts=300,
         nvlink=0, capability=(8, 9), source="products/workstations/rtx-6000/"),
    _gpu("RTX-5090", r"\bRTX 5090\b", gib=31.3, tb_per_s=1.792, tflops=(209, 104.8, 419), watts=575, nvlink=0,
         capability=(12, 0), source="geforce/graphics-cards/50-series/rtx-5090/"),
    _gpu("RTX-4090", r"\bRTX 4090\b", gib=23.6, tb_per_s=1.008, tflops=(165, 82.6, 330), watts=450, nvlink=0,
         capability=(8, 9), source="geforce/graphics-cards/40-series/rtx-4090/"),
    _gpu("A40", r"\bA40\b", gib=44.3, tb_per_s=0.696, tflops=(149.7, 37.4, 0), watts=300, nvlink=112,
         capability=(8, 6), source="data-center/a40/"),
    _gpu("A10G", r"\bA10G\b", gib=22.0, tb_per_s=0.6, tflops=(70, 35, 0), watts=300, nvlink=0,
         capability=(8, 6), source="https://aws.amazon.com/ec2/instance-types/g5/"),
    _gpu("A10", r"\bA10\b", gib=22.0, tb_per_s=0.6, tflops=(125, 31.2, 0), watts=150, nvlink=0,
         capability=(8, 6), source="data-center/products/a10-gpu/"),
    _gpu("V100-32GB", r"\bV100S?-\w+-32GB\b", gib=31.7, tb_per_s=0.9, tflops=(125, 15.7, 0), watts=300,
         nvlink=300, capability=(7, 0), source=_V100),
    _gpu("V100", r"\bV100", gib=15.7, tb_per_s=0.9, tflops=(125, 15.7, 0), watts=300, nvlink=300,
         capability=(7, 0), source=_V100),
    _gpu("T4", r"\bT4\b", gib=14.5, tb_per_s=0.32, tflops=(65, 8.1, 0), watts=70, nvlink=0,
         capability=(7, 5), source="data-center/tesla-t4/"),
)  # fmt: skip
"""The first whose pattern matches counts."""
_DEVICES = 256
"""Names of devices that are remembered: the price of each worker of a fleet is asked for every second."""


@lru_cache(_DEVICES)
def gpu_of_device(device: str) -> Gpu | None:
    """Return the GPU that a driver calls `device`, such as `NVIDIA H100 80GB HBM3`, or the node label
    nvidia.com/gpu.product, which has dashes for spaces. None if it is unknown, or a part of a GPU (MIG)."""
    if "-MIG-" in device:
        return None
    spellings = (device, device.replace("-", " "))
    return next((gpu for gpu in GPUS if any(re.search(gpu.pattern, each) for each in spellings)), None)


def gpu_named(name: str) -> Gpu | None:
    """Return the GPU that a spec calls `name`: its name in the catalogue, in any case, or its driver's."""
    wanted = name.strip().lower()
    exact = next((gpu for gpu in GPUS if gpu.name.lower() == wanted), None)
    return exact or gpu_of_device(name)


def gpu_names() -> str:
    """Return the names in the catalogue, for messages."""
    return ", ".join(gpu.name for gpu in GPUS)
