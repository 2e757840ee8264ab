"""How a worker reads weights, decided where it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit import public_models as models
from tests.kit.model_folder import write_model

from kvasir.config.load.loader import load
from kvasir_platform.apps.common.weight_reading import strategy_for, with_strategy

GIB = 1 << 30


@pytest.mark.parametrize(
    ("weights", "on_cpu", "strategy"),
    [(9, False, "prefetch"), (10, False, "lazy"), (4, True, "prefetch"), (5, True, "lazy")],
)
def test_weights_are_prefetched_if_they_fit_beside_what_the_engine_needs(
    weights: int, on_cpu: bool, strategy: str
) -> None:
    assert strategy_for(weights * GIB, 10 * GIB, on_cpu=on_cpu) == strategy


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", models.LLAMA_8B)


def chosen(source: Path, *overrides: str, free: int = GIB) -> str:
    deployment = load(None, [f"model.source={source}", *overrides])
    return with_strategy(deployment, "decode", free=free).model.load.strategy


def test_the_files_of_the_model_count(source: Path) -> None:
    assert chosen(source) == "prefetch"
    assert chosen(source, free=100) == "lazy"


def test_a_strategy_in_the_spec_is_kept(source: Path) -> None:
    assert chosen(source, "model.load.strategy=eager") == "eager"


def test_without_safetensors_it_is_left_to_vllm(source: Path) -> None:
    (source / "model.safetensors").unlink()
    assert chosen(source) == "auto"
