"""The hardware that the engine computes on, in the figures of a roofline model.

Peaks are those of the catalogue: the router's model applies the fraction that engines reach. A CPU has no
peaks: for a small model its time is overhead, which no peak describes.
"""

from __future__ import annotations

from pathlib import Path

from kvasir.core.identity import Hardware
from kvasir.hardware.gpus import gpu_of_device

_CPU_INFO = Path("/proc/cpuinfo")


def hardware_of(device: str, *, devices: int, element_bytes: int) -> Hardware:
    """Return the hardware of `devices` devices of one replica, each named `device` by its driver, with
    elements of `element_bytes` bytes. Peaks are 0 for a device that is not in the catalogue."""
    gpu = gpu_of_device(device)
    if gpu is None:
        return Hardware(device, devices)
    return Hardware(device, devices, gpu.half if element_bytes <= 2 else gpu.single, gpu.bytes_per_s)


def cpu_name() -> str:
    """Return the processor's model name, or `cpu`."""
    try:
        text = _CPU_INFO.read_text()
    except OSError:
        return "cpu"
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return "cpu"
