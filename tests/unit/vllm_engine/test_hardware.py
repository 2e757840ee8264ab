"""Device names and their properties."""

from __future__ import annotations

import pytest

from kvasir.core.identity import Hardware
from kvasir_workers.engines.vllm.setup.hardware import cpu_name, hardware_of


@pytest.mark.parametrize(
    ("name", "flops", "bytes_per_s"),
    [
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12),
        ("NVIDIA H100 PCIe", 756e12, 2.0e12),
        ("NVIDIA H20", 148e12, 4.0e12),
        ("NVIDIA L40S", 362e12, 0.864e12),
        ("NVIDIA L4", 121e12, 0.3e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1.555e12),
        ("Tesla T4", 65e12, 0.32e12),
    ],
)
def test_a_known_device_has_its_data_sheets_peaks(name: str, flops: float, bytes_per_s: float) -> None:
    assert hardware_of(name, devices=2, element_bytes=2) == Hardware(name, 2, flops, bytes_per_s)


def test_at_32_bits_the_peak_is_lower() -> None:
    assert hardware_of("NVIDIA H100 80GB HBM3", devices=1, element_bytes=4).flops == 67e12


def test_of_an_unknown_device_nothing_is_claimed() -> None:
    assert hardware_of("Voodoo 2", devices=1, element_bytes=2) == Hardware("Voodoo 2", 1, 0.0, 0.0)


def test_the_processor_has_a_name() -> None:
    assert cpu_name()
