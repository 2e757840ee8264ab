"""The hardware that the engine computes on, in the figures of a roofline model.

Peaks are from the manufacturers' data sheets, dense, at the base specification: the router's model applies
the fraction that engines reach. A CPU has no peaks: for a small model its time is overhead, which no peak
describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvasir.core.identity import Hardware

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class _Peak:
    """Operations per second at 16 and at 32 bits, and memory bytes per second."""

    half: float
    single: float
    bytes_per_s: float


# By a part of the driver's device name; the first match counts.
_PEAKS: tuple[tuple[str, _Peak], ...] = (
    ("B200", _Peak(2250e12, 75e12, 8.0e12)),
    ("H200", _Peak(989e12, 67e12, 4.8e12)),
    ("H100 PCIe", _Peak(756e12, 51e12, 2.0e12)),
    ("H100 NVL", _Peak(835e12, 60e12, 3.9e12)),
    ("H100", _Peak(989e12, 67e12, 3.35e12)),
    ("H20", _Peak(148e12, 44e12, 4.0e12)),
    ("A100-SXM4-40GB", _Peak(312e12, 19.5e12, 1.555e12)),
    ("A100-PCIE-40GB", _Peak(312e12, 19.5e12, 1.555e12)),
    ("A100", _Peak(312e12, 19.5e12, 1.935e12)),
    ("L40S", _Peak(362e12, 91.6e12, 0.864e12)),
    ("L40", _Peak(181e12, 90.5e12, 0.864e12)),
    ("L4", _Peak(121e12, 30.3e12, 0.3e12)),
    ("RTX 6000 Ada", _Peak(364e12, 91.1e12, 0.96e12)),
    ("RTX 4090", _Peak(165e12, 82.6e12, 1.008e12)),
    ("A10G", _Peak(70e12, 35e12, 0.6e12)),
    ("A10", _Peak(125e12, 31.2e12, 0.6e12)),
    ("V100", _Peak(125e12, 15.7e12, 0.9e12)),
    ("T4", _Peak(65e12, 8.1e12, 0.32e12)),
)


def hardware_of(device: str, *, devices: int, element_bytes: int) -> Hardware:
    """Return the hardware of `devices` devices of one replica, each named `device` by its driver, with
    elements of `element_bytes` bytes. Peaks are 0 for a device that is not in the table."""
    for part, peak in _PEAKS:
        if part in device:
            flops = peak.half if element_bytes <= 2 else peak.single
            return Hardware(device, devices, flops, peak.bytes_per_s)
    return Hardware(device, devices)


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
