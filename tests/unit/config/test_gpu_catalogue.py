"""A file of GPUs and prices changes the catalogue, and says which field is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.config.checks.problems import SpecError
from kvasir.config.load.gpu_catalogue import read_catalogue
from kvasir.hardware.gpus import GIB, GPUS
from kvasir.hardware.offers import OFFERS, catalogue


def written(folder: Path, text: str) -> Path:
    path = folder / "gpus.yaml"
    path.write_text(text)
    return path


def test_every_offer_is_of_a_gpu_of_the_catalogue_and_every_gpu_has_one() -> None:
    assert set(OFFERS) == {gpu.name for gpu in GPUS}
    for each in catalogue():
        assert each.offer.source
        assert each.offer.dollars_per_hour is None or each.offer.date
        assert (each.gpu.nvlink_bytes_per_s > 0) == (each.offer.nvlink_gpus > 1) or each.name == "GH200-96GB"


def test_a_price_of_ones_own_replaces_the_list_price_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path, "gpus: [{name: H100, dollars_per_hour: 1.5, source: contract, date: 2026-01}]")
    found = {each.name: each for each in read_catalogue(path)}
    before = {each.name: each for each in catalogue()}
    assert found["H100"].offer.dollars_per_hour == 1.5
    assert found["H100"].offer.price_text == "$1.50/h (contract, 2026-01)"
    assert found["H100"].gpu == before["H100"].gpu
    assert {name: each for name, each in found.items() if name != "H100"} == {
        name: each for name, each in before.items() if name != "H100"
    }


def test_a_new_gpu_is_added_with_what_it_needs(tmp_path: Path) -> None:
    text = """
gpus:
  - {name: MI300X, memory_gib: 191, bandwidth_tb_per_s: 5.3, half_tflops: 1307, fp8_tflops: 2614,
     nvlink_gb_per_s: 896, dollars_per_hour: 2}
"""
    (found,) = (each for each in read_catalogue(written(tmp_path, text)) if each.name == "MI300X")
    assert found.gpu.memory_bytes == 191 * GIB
    assert found.gpu.bytes_per_s == 5.3e12
    assert found.offer.nvlink_gpus == 8


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("gpus: [{name: H100, dollars: 1}]", "gpus[0].dollars", "unknown field"),
        ("gpus: [{name: H100, dollars_per_hour: -1}]", "gpus[0].dollars_per_hour", "-1"),
        ("gpus: [{name: H100, dollars_per_hour: cheap}]", "gpus[0].dollars_per_hour", "cheap"),
        ("gpus: [{name: X1, memory_gib: 10}]", "gpus[0].bandwidth_tb_per_s", "X1 is not in the catalogue"),
        ("gpus: []", "gpus", "empty list"),
        ("- 1", "", "list of 1"),
    ],
)
def test_a_wrong_entry_is_named_by_its_field(tmp_path: Path, text: str, field: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_catalogue(written(tmp_path, text))
    assert caught.value.message.startswith("the GPU catalogue has ")
    assert said in caught.value.message
    assert field in {problem.field for problem in caught.value.problems}


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        read_catalogue(tmp_path / "none.yaml")
