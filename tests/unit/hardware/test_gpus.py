"""The catalogue of GPUs."""

from __future__ import annotations

import pytest

from kvasir.hardware.gpus import GIB, GPUS, gpu_named, gpu_of_device


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla T4", "T4"),
    ],
)
def test_a_driver_s_name_finds_its_gpu(device: str, name: str) -> None:
    found = gpu_of_device(device)
    assert found is not None
    assert found.name == name
    # As the label of its node spells it, also if pods share it by time.
    label = device.replace(" ", "-")
    assert gpu_of_device(label) is gpu_of_device(f"{label}-SHARED") is found
    assert gpu_of_device(f"{label}-MIG-1g.5gb") is None


@pytest.mark.parametrize("device", ["NVIDIA RTX A4000", "NVIDIA T400 4GB", "Voodoo 2", ""])
def test_a_similar_name_finds_none(device: str) -> None:
    assert gpu_of_device(device) is None


def test_a_spec_may_use_the_short_name_in_any_case_or_the_driver_s() -> None:
    names = {gpu.name for name in ("h100", "H100", "NVIDIA H100 80GB HBM3") if (gpu := gpu_named(name))}
    assert names == {"H100"}
    assert gpu_named("H1000") is None


def test_names_are_unique_and_each_finds_itself() -> None:
    for gpu in GPUS:
        assert gpu_named(gpu.name) is gpu


def test_every_gpu_has_plausible_figures_and_a_source() -> None:
    for gpu in GPUS:
        assert 8 * GIB < gpu.memory_bytes < 512 * GIB, gpu.name
        assert gpu.single < gpu.half <= max(gpu.fp8, gpu.half), gpu.name
        assert (gpu.fp8 > 0) == (gpu.capability >= (8, 9)), gpu.name
        assert gpu.source, gpu.name
        assert 50 < gpu.watts <= 1200, gpu.name
